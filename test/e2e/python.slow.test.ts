/** The Python package against real cache nodes: each file of its tests is one test here. */
import { native } from '@kvtier/data-plane';
import { it } from 'vitest';
import { runsPython } from './python.ts';

it('sessions store, load, and outlive the death and the silence of their node', () => runsPython('test_session'));
it('copies move every layout, find every flipped byte, and keep what they use', () => {
  const lengths = [1, 3, 8, 16, 17, 128, 129, 240, 241, 256, 1024, 2047, 2048, 2049, 10_000];
  const sums = lengths.map((bytes) => {
    const data = Uint8Array.from({ length: bytes }, (_, i) => (i * 131) ^ (i >> 8));
    return `${Buffer.from(data).toString('hex')}=${native.xxh3_64(data)}`;
  });
  return runsPython('test_copies', { KVTIER_TEST_SUMS: sums.join(',') });
});
it('namespaces are those of our own engine', () => runsPython('test_namespace'));
