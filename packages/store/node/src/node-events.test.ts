/** What a node publishes of a tier that says block by block what it holds. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { TierChange } from '@kvtier/tiers';
import { expect, it, vi } from 'vitest';
import { NodeEvents } from './node-events.ts';

it('blocks that a tier says one by one are one batch for who reads them', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvt-events-'));
  const events = await NodeEvents.start({ endpoint: `ipc://${join(folder, 'e')}` }, console);
  try {
    let say: (change: TierChange) => void = () => {};
    const follow = (listener: typeof say): (() => void) => {
      say = listener;
      return () => {};
    };
    events.follow({ name: 'disk', follow });
    const namespace = { key: 'n', digest: Buffer.alloc(32) } as unknown as NonNullable<TierChange['namespace']>;
    for (let at = 0; at < 20; at++) {
      const hashes = [String.fromCharCode(at).repeat(32)] as unknown as TierChange['hashes'];
      say({ kind: 'stored', namespace, hashes });
    }
    await vi.waitUntil(() => events.stats().publishedBatches !== 0, { timeout: 20_000 });
    expect(events.stats().publishedBatches).toBe(1);
  } finally {
    await events.close();
    rmSync(folder, { recursive: true });
  }
});
