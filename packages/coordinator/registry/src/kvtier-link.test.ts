/** A line to one of our own workers that is closed at an awkward moment. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { KvtierLink } from './kvtier-link.ts';
import { type LinkHost, linkTimes } from './link.ts';
import { ScriptedEngine } from './testing/index.ts';

let dir: string;
let engine: ScriptedEngine;
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-link-'));
  engine = new ScriptedEngine(`unix:${dir}/engine.sock`, '/models/m');
  await engine.start();
});
afterEach(async () => {
  await engine.stop();
  rmSync(dir, { recursive: true, force: true });
});

it('closed between what the worker is and its load: the line is over, and nothing looks at it any more', async () => {
  const told: string[] = [];
  const silentMs = 20;
  let closed: Promise<void> | undefined;
  const host: LinkHost = {
    described: () => {
      closed = link.close();
      return undefined;
    },
    answers: () => told.push('answers'),
    lost: ({ code }) => told.push(code),
    refused: (why) => told.push(why),
    ended: () => {},
    usualPrefillTokensPerS: () => 1,
    usualLoadBlocksPerS: () => undefined,
  };
  const times = { ...linkTimes, silentMs };
  const link: KvtierLink = new KvtierLink({
    ...{ name: 'engine', address: `unix:${dir}/engine.sock`, sender: 's', media: [], tls: undefined },
    ...{ host, times },
  });
  link.start();
  while (closed === undefined) await new Promise(setImmediate);
  await closed;
  // What still looked for its silence would throw in a turn of its own.
  await new Promise((resolve) => setTimeout(resolve, 3 * silentMs));
  expect(told).toEqual([]);
});
