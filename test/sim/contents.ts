/** What each block must hold: a function of its namespace and name, so that a wrong block is always recognised as one. */

import { native } from '@kvtier/data-plane';
import { decodeHeader, type HashKey, headerBytes, type Namespace } from '@kvtier/identity';
import { decodeTable, hashNamed, maxTableBytes, namespaceNamed, payloadOf, seededRandom } from '@kvtier/tiers/testing';
import { Violation } from './world.ts';

export interface Space {
  readonly namespace: Namespace;
  readonly payloadBytes: number;
  /** Nothing is saved by a codec. */
  readonly isNoise: boolean;
}

/** The same in every world: names and contents are computed once. */
export const spaces: readonly Space[] = [
  { namespace: namespaceNamed('sim a'), payloadBytes: 1000, isNoise: false },
  { namespace: namespaceNamed('sim b'), payloadBytes: 6000, isNoise: false },
  { namespace: namespaceNamed('sim c'), payloadBytes: 3000, isNoise: true },
];
const spaceOf = new Map(spaces.map((space) => [space.namespace.key, space]));
const contents = new Map<string, { readonly payload: Buffer; readonly checksum: bigint }>();
const names = new Map<string, HashKey>();

export function contentOf(namespace: Namespace, hash: HashKey) {
  const key = namespace.key + hash;
  let content = contents.get(key);
  if (content === undefined) {
    const { payloadBytes, isNoise } = spaceOf.get(namespace.key)!;
    const payload = payloadOf(namespace, hash, payloadBytes);
    if (isNoise) {
      const random = seededRandom(payload.readUInt32LE(4));
      for (let at = 8; at + 4 <= payloadBytes; at += 4) payload.writeUInt32LE(random() * 2 ** 32, at);
    }
    content = { payload, checksum: native.xxh3_64(payload) };
    contents.set(key, content);
  }
  return content;
}

/** A family's blocks up to `fork` are shared by all of its variants. */
export function chainOf(family: number, variant: number, fork: number, count: number): HashKey[] {
  return Array.from({ length: count }, (_, index) => {
    const name = index < fork ? `${family}:${index}` : `${family}.${variant}.${fork}:${index}`;
    let hash = names.get(name);
    if (hash === undefined) {
      hash = hashNamed(name);
      names.set(name, hash);
    }
    return hash;
  });
}

/** A short name for lines of a trace. */
export const shortName = (hash: HashKey): string => Buffer.from(hash.slice(0, 3), 'latin1').toString('hex');

/** Law 1: the object in the slot at `slot` is the one of this name, header and payload. */
export function mustHold(memory: Buffer, slot: number, namespace: Namespace, hash: HashKey, what: string): void {
  const { payload, checksum } = contentOf(namespace, hash);
  const header = decodeHeader(memory.subarray(slot, slot + headerBytes));
  if ('error' in header) throw new Violation(`law 1: ${what}: no header at ${slot} (${header.error})`);
  const right =
    header.hash === hash &&
    header.payloadChecksum === checksum &&
    Buffer.compare(header.namespace, namespace.digest) === 0;
  if (!right) throw new Violation(`law 1: ${what}: the header at ${slot} is that of another block`);
  const at = slot + headerBytes;
  if (payload.compare(memory, at, at + payload.length) !== 0) {
    throw new Violation(`law 1: ${what}: the payload at ${slot} is not that of block ${shortName(hash)}`);
  }
}

/** The same of an object as a lower tier has it: as it is, or encoded from that one. */
export function mustBeStored(bytes: Buffer, at: number, namespace: Namespace, hash: HashKey, what: string): void {
  const header = decodeHeader(bytes.subarray(at, at + headerBytes));
  if ('error' in header || header.codec === 0) {
    mustHold(bytes, at, namespace, hash, what);
    return;
  }
  const { payloadBytes, payloadChecksum } = header;
  const payload = bytes.subarray(at + headerBytes, at + headerBytes + payloadBytes);
  const table = decodeTable(payload.subarray(0, maxTableBytes), payloadBytes);
  const isRight =
    header.hash === hash &&
    Buffer.compare(header.namespace, namespace.digest) === 0 &&
    native.xxh3_64(payload) === payloadChecksum &&
    table?.rawChecksum === contentOf(namespace, hash).checksum;
  if (!isRight) throw new Violation(`law 1: ${what}: what is encoded at ${at} is not block ${shortName(hash)}`);
}
