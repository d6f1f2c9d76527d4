/** For tests of others: settings of a list of members, a log that can be waited for, a member as a process of its own. */
import { type ChildProcess, spawn } from 'node:child_process';
import { createInterface } from 'node:readline';
import { type MemberServers, memberServersSchema } from '@kvtier/config';
import type { Log } from '@kvtier/runtime';
import { bundled } from '../../../../../scripts/lib/test-programs.mjs';

/** Of servers of infra/redis. */
export function memberServers(
  urls: readonly string[],
  mode: MemberServers['mode'] = 'single',
  keyPrefix = 'kvtier:',
  /** A server that a busy machine keeps waiting is no problem before that. */
  timeLimitMs = 5_000,
): MemberServers {
  const masterName = mode === 'sentinel' ? { masterName: 'kvtier' } : {};
  return memberServersSchema.parse({ mode, servers: urls, ...masterName, keyPrefix, timeLimitMs });
}

/** Lines, as a log takes them. */
export class Lines implements Log {
  readonly all: string[] = [];
  #waiting: (() => void)[] = [];
  readonly #add = (level: string) => (fields: object, message: string) => {
    this.all.push(`${level} ${message} ${JSON.stringify(fields)}`);
    for (const each of this.#waiting.splice(0)) each();
  };
  readonly info = this.#add('info');
  readonly warn = this.#add('warn');
  readonly error = this.#add('error');

  matching(pattern: RegExp): string[] {
    return this.all.filter((line) => pattern.test(line));
  }

  /** The test's own limit ends a wait for what never comes. */
  async until(pattern: RegExp): Promise<void> {
    while (this.matching(pattern).length === 0) await new Promise<void>((resolve) => this.#waiting.push(resolve));
  }
}

/** A process that announces the worker `name`; it has been announced when this is fulfilled. */
export async function startMember(redis: MemberServers, name: string): Promise<ChildProcess> {
  const [main] = await bundled(new URL('./member-main.ts', import.meta.url));
  const child = spawn(process.execPath, [main, JSON.stringify({ redis, name })], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  for await (const line of createInterface(child.stdout)) if (line === 'announced') return child;
  throw new Error(`the member ended (${child.exitCode})`);
}
