/** The Python package against real cache nodes: each file of its tests is one test here; more in python.long.test.ts. */
import { native } from '@kvtier/data-plane';
import { it } from 'vitest';
import { runs } from './python.ts';

it('sessions store, load, and outlive the death and the silence of their node', () => runs('test_session'));
it('copies move every layout, find every flipped byte, and keep what they use', () => {
  const lengths = [1, 3, 8, 16, 17, 128, 129, 240, 241, 256, 1024, 2047, 2048, 2049, 10_000];
  const sums = lengths.map((bytes) => {
    const data = Uint8Array.from({ length: bytes }, (_, i) => (i * 131) ^ (i >> 8));
    return `${Buffer.from(data).toString('hex')}=${native.xxh3_64(data)}`;
  });
  return runs('test_copies', { env: { KVTIER_TEST_SUMS: sums.join(',') } });
});
it("copies of a GPU's memory, on the emulator: every layout, every flipped byte, pins refused, a device that hangs", () =>
  runs('test_device_copies test_device_hangs'));
it('nothing that a node says harms the engine', () => runs('test_lies'));
it('beside an older node and a newer one: what is not known is skipped and counted', () => runs('test_mixed_versions'));
it('what the table of held blocks lacks is not asked for, and what is held is never lacking', () => runs('test_held'));
it('namespaces are those of our own engine', () => runs('test_namespace'));
