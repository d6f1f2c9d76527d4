/** Byte counts as people write them on a command line: "1GiB", "512m", "64 KiB", "1073741824". */
import { miswritten } from './miswritten.ts';

const units: Readonly<Record<string, number>> = { '': 1, k: 2 ** 10, m: 2 ** 20, g: 2 ** 30, t: 2 ** 40 };

/** @throws KvError CONFIG naming `option`. */
export function parseBytes(text: string, option: string, minBytes = 1): number {
  const match = /^(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?$/i.exec(text.trim());
  const bytes = match ? Math.floor(Number(match[1]) * units[match[2]!.toLowerCase()]!) : Number.NaN;
  if (Number.isSafeInteger(bytes) && bytes >= minBytes) return bytes;
  if (bytes < minBytes) {
    throw miswritten(`${option}: "${text}" is too little; ask for ${formatBytes(minBytes)} or more`);
  }
  throw miswritten(`${option}: "${text}" is not a number of bytes; write for example 512MiB or 2GiB`);
}

export function formatBytes(bytes: number): string {
  for (const [unit, size] of [
    ['TiB', 2 ** 40],
    ['GiB', 2 ** 30],
    ['MiB', 2 ** 20],
    ['KiB', 2 ** 10],
  ] as const) {
    if (bytes >= size) return `${Number((bytes / size).toFixed(bytes % size === 0 ? 0 : 1))} ${unit}`;
  }
  return `${bytes} B`;
}
