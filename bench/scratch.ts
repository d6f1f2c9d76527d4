/**
 * Folders for what a suite writes, one for each run. A run that was killed leaves its own behind, tens of gigabytes of it: the next
 * one removes those whose process is gone. Invariant: a folder of a process that lives is never touched, nor one of another name.
 */
import { existsSync, mkdirSync, readdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';

const named = /^[a-z0-9-]+-(\d+)$/;

/** Makes `root/suite-PID`; returns it. */
export function makeScratch(root: string, suite: string): string {
  mkdirSync(root, { recursive: true });
  for (const name of readdirSync(root)) {
    const pid = named.exec(name)?.[1];
    if (pid !== undefined && (Number(pid) === process.pid || !existsSync(`/proc/${pid}`))) {
      rmSync(join(root, name), { recursive: true, force: true });
    }
  }
  const path = join(root, `${suite}-${process.pid}`);
  mkdirSync(path);
  return path;
}
