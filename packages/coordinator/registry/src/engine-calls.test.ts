/**
 * Many short calls over one line to the engine. An HTTP/2 server ends a connection on which more calls are reset than it
 * bears (1,000, and 33 a second: CVE-2023-44487), and with it every call that runs there.
 */
import { setMaxListeners } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { EngineCalls } from './engine-calls.ts';
import { type Call, event, greedy, ScriptedEngine, say } from './testing/scripted-engine.ts';

/** Twice what a server bears at once. */
const calls = 2_000;
const atOnce = 50;

let dir: string;
let engine: ScriptedEngine;
let remote: EngineCalls;
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-link-'));
  engine = new ScriptedEngine(`unix:${dir}/engine.sock`, '/models/m');
  await engine.start();
  remote = new EngineCalls({ address: `unix:${dir}/engine.sock` });
});
afterEach(async () => {
  remote.close();
  await engine.stop();
  rmSync(dir, { recursive: true, force: true });
});

const request = (requestId: string) => greedy({ requestId, promptTokenIds: [5] });
const never = new AbortController().signal;
setMaxListeners(0, never); // all calls share it

async function tokensOf(requestId: string): Promise<number[]> {
  const tokens: number[] = [];
  for await (const { tokenIds } of remote.generate(request(requestId), never)) tokens.push(...tokenIds);
  return tokens;
}

async function many(one: (which: number) => Promise<void>): Promise<void> {
  let next = 0;
  const run = async () => {
    while (next < calls) await one(next++);
  };
  await Promise.all(Array.from({ length: atOnce }, run));
}

it.each(['read to their end', 'left at their finish reason'])('answers that are %s reset nothing', async (how) => {
  engine.script = say([34, 35]);
  let finished = 0;
  await many(async (which) => {
    for await (const { finishReason } of remote.generate(request(`a${which}`), never)) {
      if (finishReason === '') continue;
      finished++;
      if (how.startsWith('left')) break;
    }
  });
  expect(finished).toBe(calls);
  expect(remote.connections).toBe(1);
});

it('calls that are given up cost no other its answer', async () => {
  let long: Call | undefined;
  engine.script = (call, { requestId }) => {
    if (requestId === 'long') long = call;
    call.write(event({ tokenIds: [34] }));
  };
  const running = tokensOf('long');
  await many(async (which) => {
    for await (const _ of remote.generate(request(`b${which}`), never)) break;
  });
  expect(engine.seen).toHaveLength(calls + 1);
  await Promise.all(
    engine.seen.filter(({ request: { requestId } }) => requestId !== 'long').map((seen) => seen.cancelled),
  );
  long!.write(event({ tokenIds: [35], finishReason: 'stop' }));
  long!.end();
  expect(await running).toEqual([34, 35]);
  expect(remote.connections).toBeGreaterThan(calls / 1_000);
});

it('nor when more are given up at once than a server bears', async () => {
  let long: Call | undefined;
  const held: Call[] = [];
  engine.script = (call, { requestId }) => {
    if (requestId === 'long') {
      long = call;
      call.write(event({ tokenIds: [34] }));
      return;
    }
    held.push(call);
    // All of them run before the first one is left.
    if (held.length === calls) for (const each of held) each.write(event({ tokenIds: [34] }));
  };
  const running = tokensOf('long');
  const leave = async (which: number) => {
    for await (const _ of remote.generate(request(`c${which}`), never)) break;
  };
  await Promise.all(Array.from({ length: calls }, (_, which) => leave(which)));
  await Promise.all(engine.seen.slice(1).map((seen) => seen.cancelled));
  long!.write(event({ tokenIds: [35], finishReason: 'stop' }));
  long!.end();
  expect(await running).toEqual([34, 35]);
});
