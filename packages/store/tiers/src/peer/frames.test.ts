/** The opening of a connection between peers: golden bytes of nodes that tell what they know, and of older ones (docs/formats.md). */
import { readFileSync } from 'node:fs';
import { expect, it } from 'vitest';
import { allFeatures, features, featuresIn, nonceTelling } from './features.ts';
import { encode, type Message, PeerFrameReader } from './frames.ts';

const golden = (name: string): Buffer => readFileSync(new URL(`../../golden/${name}.bin`, import.meta.url));
const run = (from: number, count: number): Buffer => Buffer.from(Array.from({ length: count }, (_, i) => from + i));

const epoch = 0x0102030405060708n;
const older = run(0, 32);
const telling = Buffer.concat([run(0, 24), Buffer.from('KVTF\x03\0\0\0', 'latin1')]);
const [first, second] = [run(64, 32), run(96, 32)];

it.each<[string, Message, number]>([
  ['peer-hello-older', { kind: 'hello', epoch, nonce: older }, 0],
  ['peer-hello', { kind: 'hello', epoch, nonce: telling }, features.endPin | features.manyProofs],
  ['peer-answer-older', { kind: 'answer', epoch, nonce: older, proofs: [first] }, 0],
  ['peer-answer', { kind: 'answer', epoch, nonce: telling, proofs: [first, second] }, 3],
])('%s', (name, message, known) => {
  expect(encode(message)).toEqual(golden(name));
  const [read, ...more] = [...new PeerFrameReader().push(golden(name))];
  expect([read, more]).toEqual([message, []]);
  expect(featuresIn((read as { nonce: Buffer }).nonce)).toBe(known);
});

it('what this node knows is in its nonce, and the rest of it is random', () => {
  const [one, other] = [nonceTelling(allFeatures), nonceTelling(allFeatures)];
  expect([one.length, featuresIn(one), one.subarray(24)]).toEqual([32, 3, telling.subarray(24)]);
  expect(one.subarray(0, 24).equals(other.subarray(0, 24))).toBe(false);
});

it('a kind that nobody knows is read as that, and what follows it as it is; a known one of a wrong length is refused', () => {
  const reader = new PeerFrameReader();
  const unknown = Buffer.concat([Buffer.of(4, 0, 0, 0, 77), Buffer.from('any')]);
  expect([...reader.push(Buffer.concat([unknown, encode({ kind: 'ping' })]))]).toEqual([
    { kind: 'unknown', number: 77 },
    { kind: 'ping' },
  ]);
  for (const bytes of [82, 83, 85, 116, 20 + 32 + 9 * 32]) {
    const answer = Buffer.concat([Buffer.alloc(5), golden('peer-answer').subarray(5), Buffer.alloc(300)]);
    answer.writeUInt32LE(bytes + 1, 0);
    answer[4] = 2;
    const cut = answer.subarray(0, 5 + bytes);
    if (bytes === 116) expect([...new PeerFrameReader().push(cut)]).toMatchObject([{ proofs: [first, second] }]);
    else expect(() => [...new PeerFrameReader().push(cut)]).toThrow(/^peer: no node of ours at the other end; run/);
  }
});
