/**
 * Messages of the control connection: u32 length, u8 kind, body; little-endian (docs/formats.md, "Peer protocol"). Invariant:
 * what arrives is read within bounds; a kind that is not known is read as that, so that a newer node may be answered; any other thing
 * that is not a message of this version throws KvError PROTOCOL, and nothing is buffered beyond one message of at most 64 KiB.
 */
import { Buffer } from 'node:buffer';
import { KvError } from '@kvtier/errors';
import { type HashKey, hashKeyAt, type Namespace, namespaceFromDigest, packHashKeys } from '@kvtier/identity';
import { nonceBytes } from './features.ts';

export const protocolVersion = 1;
export const magic = Buffer.from('KVTPCTRL', 'latin1');
export const maxFrameBytes = 64 << 10;
/** Hashes in one message: 32 bytes each, with room to spare in a frame. */
export const maxHashes = 1024;

export const kinds = {
  hello: 1,
  answer: 2,
  proof: 3,
  welcome: 4,
  change: 5,
  ping: 6,
  pong: 7,
  hint: 8,
  listed: 9,
  endPin: 10,
} as const;
/** Of one secret, or of each of several. */
const proofBytes = 32;
const maxProofs = 8;
const ticketBytes = 16;
const fixedBytes = {
  hello: 20 + nonceBytes,
  proof: proofBytes,
  welcome: 16 + 2 + 4,
  endPin: 32 + ticketBytes,
} as const;

export type Message =
  | { readonly kind: 'hello'; readonly epoch: bigint; readonly nonce: Buffer }
  | { readonly kind: 'answer'; readonly epoch: bigint; readonly nonce: Buffer; readonly proofs: readonly Buffer[] }
  | { readonly kind: 'proof'; readonly proof: Buffer }
  | { readonly kind: 'welcome'; readonly session: Buffer; readonly dataPort: number; readonly heartbeatMs: number }
  | ChangeMessage
  | { readonly kind: 'ping' | 'pong' }
  /** All that was held when the connection began has been told. */
  | { readonly kind: 'listed' }
  | {
      readonly kind: 'hint';
      readonly what: 'used' | 'corrupt';
      readonly namespace: Namespace;
      readonly hashes: readonly HashKey[];
    }
  /** Somebody has shown the ticket of a pin; the server's sessions may have it. */
  | { readonly kind: 'endPin'; readonly namespace: Namespace; readonly ticket: Buffer };

/** Of a newer node. */
export interface UnknownMessage {
  readonly kind: 'unknown';
  readonly number: number;
}
export type Received = Message | UnknownMessage;

export interface ChangeMessage {
  readonly kind: 'change';
  /** 1, 2, 3 ... on one connection. */
  readonly sequence: number;
  /** Which of the peer's tiers: 0 its arena, 1 what is below. */
  readonly tier: 0 | 1;
  readonly change: 'stored' | 'removed' | 'cleared';
  /** null for 'cleared'. */
  readonly namespace: Namespace | null;
  readonly hashes: readonly HashKey[];
}

const changes = ['stored', 'removed', 'cleared'] as const;
const hints = ['used', 'corrupt'] as const;
const refuse = (what: string): KvError =>
  new KvError('PROTOCOL', `peer: ${what}; run nodes of one version, and only nodes, on the peers' port`);

export function encode(message: Message): Buffer {
  const body = bodyOf(message);
  const head = Buffer.alloc(5);
  head.writeUInt32LE(body.length + 1, 0);
  head[4] = kinds[message.kind];
  return Buffer.concat([head, body]);
}

function bodyOf(message: Message): Buffer {
  switch (message.kind) {
    case 'hello':
      return Buffer.concat([opening(message.epoch), message.nonce]);
    case 'answer':
      return Buffer.concat([opening(message.epoch), message.nonce, ...message.proofs]);
    case 'proof':
      return message.proof;
    case 'welcome': {
      const tail = Buffer.alloc(6);
      tail.writeUInt16LE(message.dataPort, 0);
      tail.writeUInt32LE(message.heartbeatMs, 2);
      return Buffer.concat([message.session, tail]);
    }
    case 'change': {
      const head = Buffer.alloc(10);
      head.writeUIntLE(message.sequence, 0, 6);
      head[8] = message.tier;
      head[9] = changes.indexOf(message.change);
      return Buffer.concat([head, names(message.namespace, message.hashes)]);
    }
    case 'hint':
      return Buffer.concat([Buffer.of(hints.indexOf(message.what)), names(message.namespace, message.hashes)]);
    case 'endPin':
      return Buffer.concat([message.namespace.digest, message.ticket]);
    default:
      return Buffer.alloc(0);
  }
}

function opening(epoch: bigint): Buffer {
  const out = Buffer.alloc(20);
  magic.copy(out);
  out.writeUInt32LE(protocolVersion, 8);
  out.writeBigUInt64LE(epoch, 12);
  return out;
}

/** Namespace digest (zeros for none), bytes of a hash, count, hashes. */
function names(namespace: Namespace | null, hashes: readonly HashKey[]): Buffer {
  const head = Buffer.alloc(35);
  if (namespace !== null) head.set(namespace.digest, 0);
  head[32] = hashes[0]?.length ?? 0;
  head.writeUInt16LE(hashes.length, 33);
  return Buffer.concat([head, hashes.length === 0 ? Buffer.alloc(0) : packHashKeys(hashes)]);
}

/** Throws KvError PROTOCOL. */
export function decode(frame: Buffer): Received {
  const body = frame.subarray(1);
  switch (frame[0]) {
    case kinds.hello:
      return { kind: 'hello', epoch: openingOf(body, fixedBytes.hello), nonce: body.subarray(20, fixedBytes.hello) };
    case kinds.answer: {
      const proofs = proofsIn(body.subarray(fixedBytes.hello));
      const epoch = openingOf(body, fixedBytes.hello + proofs.length * proofBytes);
      return { kind: 'answer', epoch, nonce: body.subarray(20, fixedBytes.hello), proofs };
    }
    case kinds.proof:
      if (body.length !== fixedBytes.proof) throw refuse('a proof of a wrong length');
      return { kind: 'proof', proof: body };
    case kinds.welcome:
      if (body.length !== fixedBytes.welcome) throw refuse('a welcome of a wrong length');
      return {
        kind: 'welcome',
        session: body.subarray(0, 16),
        dataPort: body.readUInt16LE(16),
        heartbeatMs: body.readUInt32LE(18),
      };
    case kinds.change: {
      const [tier, change] = [body[8], changes[body[9] ?? 255]];
      if (body.length < 45 || (tier !== 0 && tier !== 1) || change === undefined)
        throw refuse('a change of no known kind');
      const { namespace, hashes } = namesOf(body.subarray(10));
      if (change === 'cleared' && hashes.length > 0) throw refuse('a change of no known kind');
      const sequence = body.readUIntLE(0, 6);
      return { kind: 'change', sequence, tier, change, namespace: change === 'cleared' ? null : namespace, hashes };
    }
    case kinds.hint: {
      const what = hints[body[0] ?? 255];
      if (what === undefined) throw refuse('a hint of no known kind');
      return { kind: 'hint', what, ...namesOf(body.subarray(1)) };
    }
    case kinds.endPin:
      if (body.length !== fixedBytes.endPin) throw refuse('a ticket of a wrong length');
      return { kind: 'endPin', namespace: namespaceFromDigest(body.subarray(0, 32)), ticket: body.subarray(32) };
    case kinds.ping:
    case kinds.pong:
    case kinds.listed:
      if (body.length !== 0) throw refuse('a message that is too long');
      return { kind: frame[0] === kinds.ping ? 'ping' : frame[0] === kinds.pong ? 'pong' : 'listed' };
    default:
      return { kind: 'unknown', number: frame[0]! };
  }
}

/** One at least. */
function proofsIn(bytes: Buffer): readonly Buffer[] {
  const count = Math.min(maxProofs, Math.max(1, Math.floor(bytes.length / proofBytes)));
  return Array.from({ length: count }, (_, at) => bytes.subarray(at * proofBytes, (at + 1) * proofBytes));
}

function openingOf(body: Buffer, bytes: number): bigint {
  if (body.length !== bytes || body.compare(magic, 0, 8, 0, 8) !== 0) throw refuse('no node of ours at the other end');
  const version = body.readUInt32LE(8);
  if (version !== protocolVersion) throw refuse(`the other end speaks version ${version}, not ${protocolVersion}`);
  return body.readBigUInt64LE(12);
}

function namesOf(body: Buffer): { namespace: Namespace; hashes: HashKey[] } {
  if (body.length < 35) throw refuse('a list of names that is cut off');
  const hashBytes = body[32]!;
  const count = body.readUInt16LE(33);
  const empty = count === 0 && hashBytes === 0;
  if (count > maxHashes || !(empty || hashBytes === 16 || hashBytes === 32))
    throw refuse('a list of names out of range');
  if (body.length !== 35 + count * hashBytes) throw refuse('a list of names of a wrong length');
  const packed = body.subarray(35);
  const hashes = Array.from({ length: count }, (_, index) => hashKeyAt(packed, index, hashBytes));
  return { namespace: namespaceFromDigest(body.subarray(0, 32)), hashes };
}

/** Cuts a stream of bytes into messages. */
export class PeerFrameReader {
  #waiting = Buffer.alloc(0);

  /** Throws KvError PROTOCOL; then the stream is of no more use. */
  *push(bytes: Buffer): Generator<Received> {
    let rest = this.#waiting.length === 0 ? bytes : Buffer.concat([this.#waiting, bytes]);
    while (rest.length >= 4) {
      const length = rest.readUInt32LE(0);
      if (length < 1 || length > maxFrameBytes) throw refuse('a message longer than any');
      if (rest.length < 4 + length) break;
      // Copied: hashes and keys outlive the socket's buffer.
      yield decode(Buffer.from(rest.subarray(4, 4 + length)));
      rest = rest.subarray(4 + length);
    }
    this.#waiting = Buffer.from(rest);
  }
}
