/**
 * One setup at a time in one checkout. The lock is held by `flock` around a `cat` whose input is our pipe: when this process
 * ends in whatever way, the pipe closes, cat ends and the kernel frees the lock. No stale lock can exist.
 */
import { spawn } from 'node:child_process';
import { mkdirSync } from 'node:fs';
import { dirname } from 'node:path';
import { onPath, SetupError } from './command.mjs';

/**
 * @template T
 * @param {string} file
 * @param {() => Promise<T>} work
 * @returns {Promise<T>}
 */
export async function withLock(file, work) {
  if (!onPath('flock')) return work(); // not Linux with util-linux: concurrent set-ups are then the user's care
  mkdirSync(dirname(file), { recursive: true });
  const holder = spawn('flock', ['--exclusive', file, 'cat'], { stdio: ['pipe', 'pipe', 'inherit'] });
  const ended = new Promise((resolve) => holder.once('close', resolve));
  try {
    await new Promise((resolve, reject) => {
      holder.once('error', (error) => reject(new SetupError(`flock: cannot be started (${error.message})`)));
      holder.once('exit', () => reject(new SetupError(`${file}: cannot be locked; is the folder writable?`)));
      holder.stdout.once('data', resolve); // cat runs, so the lock is ours
      holder.stdin.on('error', () => {}); // the exit above says it
      holder.stdin.write('.');
    });
    return await work();
  } finally {
    holder.stdin.end();
    await ended;
  }
}
