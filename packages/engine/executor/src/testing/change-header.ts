/** Rewrites the header of a safetensors file; the data after it stays. Test code only. */
import { readFile, writeFile } from 'node:fs/promises';

export type Header = Record<string, Record<string, unknown>>;

/** `change` changes the header, or returns what takes its place: an object, or any text. */
export async function changeHeader(path: string, change: (header: Header) => unknown): Promise<void> {
  const bytes = await readFile(path);
  const length = Number(bytes.readBigUInt64LE());
  const header = JSON.parse(bytes.toString('utf8', 8, 8 + length)) as Header;
  const changed = change(header) ?? header;
  const text = Buffer.from(typeof changed === 'string' ? changed : JSON.stringify(changed));
  const prefix = Buffer.alloc(8);
  prefix.writeBigUInt64LE(BigInt(text.length));
  await writeFile(path, Buffer.concat([prefix, text, bytes.subarray(8 + length)]));
}
