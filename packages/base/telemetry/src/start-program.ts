/**
 * How a bundle begins (scripts/lib/programs.mjs): as one script, with the code that V8 made of it when it was bundled, so that megabytes are
 * neither scanned nor compiled again: a third of a start's work. Where that code is of another Node, other flags or another CPU, V8 makes it anew.
 */
import { existsSync, readFileSync, renameSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname } from 'node:path';
import { fileURLToPath } from 'node:url';
import { cachedDataVersionTag, setFlagsFromString } from 'node:v8';
import { Script } from 'node:vm';
import { tellLinesOf } from './source-lines.ts';

/** V8 compares no more of a source than its length: bundles are named by their content, and their code by them. */
const codeOf = (file: string): string => `${file}.${cachedDataVersionTag()}.code`;

/** @param bundle a function of what CommonJS gives a module, and of what imports a package; in ASCII; `BUNDLE.lines` tells its lines */
export function startProgram(bundle: URL): void {
  prepare(bundle).run();
}

/** Whether a start now, with this Node and its flags, finds code that V8 takes. */
export function isCodeKept(bundle: URL): boolean {
  return prepare(bundle).script.cachedDataRejected === false;
}

/** Begins the program, and keeps the code that V8 has made until its first wait, for each of these flags. Nothing of it may run on. */
export function keepCode(bundle: URL, flags: readonly (readonly string[])[]): void {
  const { file, script, run } = prepare(bundle);
  try {
    run();
  } catch {
    // A thread's program misses what a thread is given; by then most of it is loaded.
  }
  for (const some of flags) {
    for (const flag of some) setFlagsFromString(flag);
    writeFileSync(`${codeOf(file)}.new`, script.createCachedData());
    renameSync(`${codeOf(file)}.new`, codeOf(file)); // V8 does not look for a torn one
  }
}

function prepare(bundle: URL): { readonly file: string; readonly script: Script; readonly run: () => void } {
  const file = fileURLToPath(bundle);
  tellLinesOf(file, `${file}.lines`);
  const code = codeOf(file);
  const script = new Script(readFileSync(file, 'latin1'), {
    filename: file,
    ...(existsSync(code) && { cachedData: readFileSync(code) }),
  });
  const run = (): void => {
    const module = { exports: {} };
    const importing = (name: string): Promise<unknown> => import(name);
    script.runInThisContext()(module.exports, createRequire(bundle), module, file, dirname(file), importing);
  };
  return { file, script, run };
}
