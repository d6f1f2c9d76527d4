/** Keys of CURVE (ZeroMQ): 32 bytes, as text in Z85, 40 characters. The public key of a pair follows from the secret one. */
import { createPrivateKey, createPublicKey } from 'node:crypto';

const digits = '0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#';
const keyPattern = /^[0-9a-zA-Z.\-:+=^!/*?&<>()[\]{}@%$#]{40}$/;

export const isCurveKey = (text: string): boolean => keyPattern.test(text);

/** ZeroMQ's text form of binary keys (rfc.zeromq.org/spec/32): five digits of base 85 are four bytes. */
export function z85Decode(text: string): Buffer {
  const bytes = Buffer.alloc((text.length / 5) * 4);
  for (let i = 0; i < text.length; i += 5) {
    let value = 0;
    for (const digit of text.slice(i, i + 5)) value = value * 85 + digits.indexOf(digit);
    bytes.writeUInt32BE(value % 2 ** 32, (i / 5) * 4);
  }
  return bytes;
}

function z85Encode(bytes: Buffer): string {
  let text = '';
  for (let i = 0; i < bytes.length; i += 4) {
    const value = bytes.readUInt32BE(i);
    for (let power = 85 ** 4; power >= 1; power /= 85) text += digits[Math.floor(value / power) % 85];
  }
  return text;
}

/** What stands before the bytes of an X25519 key in PKCS #8. */
const pkcs8Head = Buffer.from('302e020100300506032b656e04220420', 'hex');

/** Z85, as `secretKey` is. */
export function curvePublicKey(secretKey: string): string {
  const key = createPrivateKey({
    key: Buffer.concat([pkcs8Head, z85Decode(secretKey)]),
    format: 'der',
    type: 'pkcs8',
  });
  return z85Encode(createPublicKey(key).export({ format: 'der', type: 'spki' }).subarray(-32));
}

/** A file's only line. @throws Error: it is no key */
export function curveKeyIn(file: Buffer): string {
  const [key, ...more] = curveKeysIn(file, 1);
  if (key === undefined || more.length > 0) throw new Error('holds no CURVE key');
  return key;
}

/** One a line; "#" begins a remark, where it begins the line and the line is no key. @throws Error: not 1 to `most` keys */
export function curveKeysIn(file: Buffer, most: number): readonly string[] {
  const lines = file
    .toString('utf8')
    .split('\n')
    .map((line) => line.trim());
  const keys = lines.filter((line) => line !== '' && (isCurveKey(line) || !line.startsWith('#')));
  const bad = keys.findIndex((key) => !isCurveKey(key));
  if (bad !== -1) throw new Error('holds a line that is no CURVE key: 40 characters of Z85');
  if (keys.length === 0 || keys.length > most) throw new Error(`holds ${keys.length} CURVE keys, not 1 to ${most}`);
  return keys;
}
