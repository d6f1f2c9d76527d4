/**
 * The model's content digest: SHA-256 over the canonical config and the XXH3-128 of each weight file. XXH3 runs at memory
 * speed, and the digest guards against mix-ups, not against whoever may write the model folder: he decides the answers
 * anyway. Files are hashed once: the result is kept beside path, size and change times, so that a start does not re-read.
 */
import { createHash } from 'node:crypto';
import { mkdir, readFile, realpath, rename, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { cacheDir } from './cache-dir.ts';
import type { ModelConfig } from './model-config.ts';
import { changed, type ModelFile, sameFacts } from './model-folder.ts';

/** The native hash of a file: XXH3-128 of the bytes of an open file, 16 bytes big-endian. */
export type FileHash = (fd: number, path: string) => Promise<Uint8Array>;

/**
 * 32 bytes. Throws KvError('MODEL') when a file cannot be read, or was written to while it was; a cache that cannot be used is
 * only slower.
 */
export async function modelDigest(
  config: ModelConfig,
  files: readonly ModelFile[],
  hashFile: FileHash,
): Promise<Uint8Array> {
  const hash = createHash('sha256').update('kvtier model 1\n').update(config.canonical);
  for (const file of files) hash.update(`\n${await fileDigest(file, hashFile)}`);
  return new Uint8Array(hash.digest());
}

/** Of an open file, whose facts say which bytes it has: the name it had, or has now, only says where the result is kept. */
async function fileDigest({ path: name, fd, handle, facts: known }: ModelFile, hashFile: FileHash): Promise<string> {
  const path = await realpath(name).catch(() => name);
  const { dev, ino, size, mtimeNs, ctimeNs } = known;
  const facts = `${path}\n${size} ${mtimeNs} ${ctimeNs} ${dev}:${ino}`;
  const folder = digestsDir();
  const entry = folder && join(folder, createHash('sha256').update(path).digest('hex').slice(0, 32));
  const [keptFacts, kept] = entry ? (await readFile(entry, 'utf8').catch(() => '')).split('\n\n') : [];
  if (keptFacts === facts && /^[0-9a-f]{32}$/.test(kept ?? '')) return kept!;

  const fresh = await hashFile(fd, name);
  if (!sameFacts(known, await handle.stat({ bigint: true }))) throw changed(name);
  const text = Buffer.from(fresh).toString('hex');
  if (!folder || !entry) return text;
  const temporary = `${entry}.${process.pid}.${process.hrtime.bigint()}`;
  await mkdir(folder, { recursive: true, mode: 0o700 })
    .then(() => writeFile(temporary, `${facts}\n\n${text}`, { mode: 0o600 }))
    .then(() => rename(temporary, entry))
    .catch(() => {}); // a home that cannot be written costs the next start a re-read, nothing else
  return text;
}

/** undefined: there is no place for them. */
function digestsDir(): string | undefined {
  try {
    return join(cacheDir(), 'digests');
  } catch {
    return undefined;
  }
}
