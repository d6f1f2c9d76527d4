/**
 * `GenerateOrder` on the wire, with its prompt packed and unpacked by one native call: ten thousand token ids are nearly all of it. The
 * bytes are protobuf's, and whoever writes or reads them otherwise is understood, and understands.
 *
 *     order:   number · begin ─▶ request:  what else it says · prompt_token_ids, packed
 */
import { BinaryReader, BinaryWriter } from '@bufbuild/protobuf/wire';
import { native } from '@kvtier/data-plane';
import { GenerateOrder, GenerateRequest } from './generated/kvtier/v1/engine.ts';

/** Of a field's number and its kind: uint32, or bytes that a length precedes. */
const tags = { number: 8, begin: 18, packedIds: 18, idAlone: 16 } as const;
/** With fewer the generated code is as fast. */
const leastIds = 64;

export function encodeOrder(order: GenerateOrder): Buffer {
  const { number, begin } = order;
  // What is a list of numbers may hold some that cannot be written: the generated code says which.
  const ids: unknown = begin?.promptTokenIds;
  if (begin === undefined || !(ids instanceof Uint32Array) || ids.length < leastIds)
    return Buffer.from(GenerateOrder.encode(order).finish());
  const rest = GenerateRequest.encode({ ...begin, promptTokenIds: [] }).finish();
  const packed = native.packIds(ids);
  const idsHead = new BinaryWriter().uint32(tags.packedIds).uint32(packed.length).finish();
  const beginBytes = rest.length + idsHead.length + packed.length;
  const head = new BinaryWriter().uint32(tags.number).uint32(number).uint32(tags.begin).uint32(beginBytes).finish();
  return Buffer.concat([head, rest, idsHead, packed]);
}

/** Its prompt may be an Uint32Array: it is to be read id by id. @throws Error: it is no message */
export function decodeOrder(bytes: Buffer): GenerateOrder {
  return decodePacked(bytes) ?? GenerateOrder.decode(bytes);
}

/** undefined: a message of another form, or none. */
function decodePacked(bytes: Buffer): GenerateOrder | undefined {
  if (bytes.length < leastIds) return undefined;
  const begin = onlyField(bytes, tags.begin);
  if (begin === undefined) return undefined;
  const request = bytes.subarray(begin.from, begin.end);
  const list = onlyField(request, tags.packedIds, tags.idAlone);
  const ids = list && native.unpackIds(request.subarray(list.from, list.end));
  if (!list || !ids) return undefined;
  const order = GenerateOrder.decode(Buffer.concat([bytes.subarray(0, begin.at), bytes.subarray(begin.end)]));
  order.begin = GenerateRequest.decode(Buffer.concat([request.subarray(0, list.at), request.subarray(list.end)]));
  order.begin.promptTokenIds = ids as unknown as number[];
  return order;
}

/** Where the value of this field lies, and the field begins (`at`); undefined: it is there more than once or never, another one is, or it is no message. */
function onlyField(
  bytes: Uint8Array,
  tag: number,
  another?: number,
): { at: number; from: number; end: number } | undefined {
  const reader = new BinaryReader(bytes);
  let found: { at: number; from: number; end: number } | undefined;
  try {
    while (reader.pos < reader.len) {
      const at = reader.pos;
      const next = reader.uint32();
      if (next === another || (next === tag && found !== undefined)) return undefined;
      if (next === tag) {
        const length = reader.uint32();
        found = { at, from: reader.pos, end: reader.pos + length };
        reader.pos += length;
        if (reader.pos > reader.len) return undefined;
      } else if ((next & 7) === 4 || next === 0) return undefined;
      else reader.skip(next & 7);
    }
  } catch {
    return undefined;
  }
  return found;
}
