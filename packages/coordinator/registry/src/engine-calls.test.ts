/**
 * Many short calls over one line to the engine. An HTTP/2 server ends a connection on which more calls are reset than it
 * bears (1,000, and 33 a second: CVE-2023-44487), and with it every call that runs there.
 */
import { setMaxListeners } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { KvError } from '@kvtier/errors';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
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

describe('an engine that takes many requests by one call', () => {
  beforeEach(() => remote.describe());

  it('has one call for all, and those that are given up reset nothing', async () => {
    engine.script = (call, { requestId }) => {
      call.write(event({ tokenIds: [34] }));
      if (requestId.startsWith('whole')) call.write(event({ tokenIds: [35], finishReason: 'stop' }));
    };
    await many(async (which) => {
      const tokens: number[] = [];
      const isWhole = which % 2 === 0;
      await remote.follow(request(`${isWhole ? 'whole' : 'left'}${which}`), never, ({ tokenIds }) => {
        tokens.push(...tokenIds);
        return isWhole ? undefined : false;
      });
      expect(tokens).toEqual(isWhole ? [34, 35] : [34]);
    });
    const left = engine.seen.filter(({ request: { requestId } }) => requestId.startsWith('left'));
    expect(left).toHaveLength(calls / 2);
    await Promise.all(left.map(({ cancelled }) => cancelled));
    expect([engine.manyCalls, remote.connections, remote.running]).toEqual([1, 1, 0]);
  });

  it('fails all of them when it is gone, with the address; the next one goes by a call to who is there then', async () => {
    engine.script = (call) => void call.write(event({ tokenIds: [34] }));
    let begun = 0;
    const running = Array.from({ length: 20 }, (_, i) => remote.follow(request(`${i}`), never, () => void begun++));
    const ends = Promise.allSettled(running);
    await vi.waitFor(() => expect(begun).toBe(20), { timeout: 20_000 });
    await engine.stop();
    const outcomes = (await ends).map((end) => (end.status === 'rejected' ? (end.reason as KvError) : undefined));
    for (const failure of outcomes)
      expect(failure).toMatchObject({ code: 'DISCONNECTED', retry: true, message: expect.stringContaining(dir) });
    await engine.start();
    engine.script = say([36]);
    const tokens: number[] = [];
    await vi.waitFor(() => remote.follow(request('next'), never, ({ tokenIds }) => void tokens.push(...tokenIds)), {
      timeout: 10_000,
    });
    expect(tokens).toEqual([36]);
    expect(engine.manyCalls).toBe(2);
  });

  it('has a call apart for a prompt whose way would hold up others', async () => {
    engine.script = say([37]);
    await remote.follow(greedy({ promptTokenIds: new Array(65_537).fill(5) as number[] }), never, () => {});
    expect([engine.seen.length, engine.manyCalls]).toEqual([1, 0]);
  });

  it('is told of one that its caller gives up by a signal, and fails it with the signal’s reason', async () => {
    engine.script = (call) => void call.write(event({ tokenIds: [34] }));
    const leaving = new AbortController();
    const gone = new Error('the client has left');
    const answer = remote.follow(request('r'), leaving.signal, () => leaving.abort(gone));
    await expect(answer).rejects.toBe(gone);
    await engine.seen[0]!.cancelled;
  });
});
