/**
 * Running other programs: output is kept and shown only when they fail, as one line and the tail of the log.
 * `SetupError` is for people: its message says what, where and how to mend it; no stack is ever printed for it.
 */
import { spawn, spawnSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';

export const root = fileURLToPath(new URL('../..', import.meta.url)).replace(/\/$/, '');

export class SetupError extends Error {
  name = 'SetupError';
}

const keepBytes = 256 * 1024;
const tailLines = 30;

/**
 * Runs a program to its end. Resolves to its output (stdout and stderr in order of arrival); rejects with SetupError when it
 * cannot be started or its exit code is not 0.
 * @param {string} program
 * @param {string[]} args
 * @param {{cwd?: string, env?: NodeJS.ProcessEnv, note?: (text: string) => void, remedy?: string}} options
 * @returns {Promise<string>}
 */
export function command(program, args, options = {}) {
  return new Promise((resolve, reject) => {
    const child = spawn(program, args, {
      cwd: options.cwd ?? root,
      env: options.env ?? process.env,
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    let output = '';
    const take = (chunk) => {
      output = (output + chunk).slice(-keepBytes);
      const last = String(chunk).trimEnd().split('\n').at(-1)?.trim();
      if (last) options.note?.(last);
    };
    child.stdout.setEncoding('utf8').on('data', take);
    child.stderr.setEncoding('utf8').on('data', take);
    const remedy = options.remedy ? `; ${options.remedy}` : '';
    child.on('error', (error) => reject(new SetupError(`${program}: cannot be started (${error.message})${remedy}`)));
    child.on('close', (code, signal) => {
      if (code === 0) return resolve(output);
      const tail = output.trimEnd().split('\n').slice(-tailLines).join('\n');
      const how = signal ? `was killed by ${signal}` : `failed with exit code ${code}`;
      reject(new SetupError(`${[program, ...args].join(' ')}: ${how}${remedy}\n${tail}`));
    });
  });
}

/** True if a program of this name is on PATH. */
export function onPath(program) {
  return spawnSync('sh', ['-c', `command -v ${program}`], { stdio: 'ignore' }).status === 0;
}

/** Runs a program in the foreground, its output going straight to ours; resolves to its exit code (128 + n for a signal). */
export function foreground(program, args, options = {}) {
  return new Promise((resolve, reject) => {
    const child = spawn(program, args, { cwd: root, stdio: 'inherit', ...options });
    child.on('error', (error) => reject(new SetupError(`${program}: cannot be started (${error.message})`)));
    child.on('close', (code, signal) => resolve(code ?? (signal === 'SIGINT' ? 130 : 143)));
  });
}

/** The frame of every script: a SetupError is its message and exit code 1; anything else is a defect and keeps its stack. */
export async function script(main) {
  try {
    process.exitCode = (await main(process.argv.slice(2))) ?? 0;
  } catch (error) {
    process.stderr.write(`${error instanceof SetupError ? `kvtier: ${error.message}` : (error?.stack ?? error)}\n`);
    process.exitCode = 1;
  }
}
