/**
 * What ptxas said of a kernel file (registers, bytes that it spilled), kept in build/ptxas under a name of all that decides it: who compiles
 * one with `-Xptxas -v` keeps it there, and who wants to know it (packages/engine/executor/src/cuda-spills.long.test.ts) need not compile.
 */
import { createHash } from 'node:crypto';
import { existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { root } from './command.mjs';

const kept = join(root, 'build/ptxas');
export const kernels = join(root, 'packages/engine/cuda/kernels');

export const kernelSources = () => readdirSync(kernels).filter((file) => file.endsWith('.cu'));

/** The file and what it includes of ours, each once. */
function readWhole(file, seen) {
  if (seen.has(file) || !existsSync(file)) return seen;
  const text = readFileSync(file, 'utf8');
  seen.set(file, text);
  for (const [, name] of text.matchAll(/^#include "(.+)"/gm)) readWhole(join(dirname(file), name), seen);
  return seen;
}

/**
 * Where it is kept: of one source, what it includes, the architecture (sm_90a), and the compiler.
 * @param {string} source
 * @param {string} architecture
 * @param {string} nvcc what it says of its version
 */
export function ptxasFile(source, architecture, nvcc) {
  const hash = createHash('sha256').update(`${nvcc}\n${architecture}\n`);
  for (const text of readWhole(join(kernels, source), new Map()).values()) hash.update(text);
  return join(kept, `${source}-${architecture}-${hash.digest('hex').slice(0, 32)}.txt`);
}

export function keepPtxas(file, said) {
  mkdirSync(kept, { recursive: true });
  writeFileSync(file, said);
}
