/** An answer of many parts over a real socket: others have their turns meanwhile. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it } from 'vitest';
import type { KvEvent } from './event.ts';
import { KvEventPublisher } from './publisher.ts';
import { requestReplay } from './replay-client.ts';

it('a snapshot is made in turns of some pages, not of as many as the socket takes', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-ev-'));
  const replayEndpoint = `ipc://${folder}/replay`;
  const publisher = await KvEventPublisher.start({ endpoint: `ipc://${folder}/pub`, replayEndpoint });
  const page: KvEvent[] = [{ type: 'BlockRemoved', blockHashes: [1n], medium: 'GPU' }];
  const pages = 100;
  let made = 0;
  let most = 0;
  publisher.tellSnapshots(function* () {
    for (let i = 0; i < pages; i++) {
      // A page takes a millisecond at least.
      for (const endMs = performance.now() + 1; performance.now() < endMs; );
      made++;
      yield page;
    }
  });
  let before = 0;
  let turn = setImmediate(function look() {
    most = Math.max(most, made - before);
    before = made;
    turn = setImmediate(look);
  });
  try {
    const limits = { deadlineMs: 60_000, silenceMs: 60_000, maxMessageBytes: 1 << 20, curve: null };
    const { signal } = new AbortController();
    let parts = 0;
    for await (const _ of requestReplay({ endpoint: replayEndpoint, fromSeq: 'snapshot', ...limits, signal })) parts++;
    // Before them, one that says that this is all.
    expect([parts, made]).toEqual([pages + 1, pages]);
    // Five milliseconds of them.
    expect(most).toBeLessThanOrEqual(5);
  } finally {
    clearImmediate(turn);
    await publisher.close();
    rmSync(folder, { recursive: true });
  }
});
