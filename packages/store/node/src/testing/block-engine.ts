/** An engine of a node's tests: it writes and reads blocks whose bytes come from their names. */
import { native } from '@kvtier/data-plane';
import { packed, RawClient } from '@kvtier/session/testing';
import { expect } from 'vitest';

/** Chains are of `count` blocks. */
export async function blockEngine(socketPath: string, count: number, payloadBytes = 100_000) {
  const client = await RawClient.connect(socketPath);
  const { arenaPath, arenaBytes, arenaId } = await client.attach({ payloadBytes: BigInt(payloadBytes) });
  const arena = native.arenaOpen(arenaPath, Number(arenaBytes), arenaId);
  const bytesOf = (chain: string, index: number): Buffer => Buffer.alloc(payloadBytes, `${chain}:${index} `);
  return {
    client,
    async write(chain: string): Promise<void> {
      const request = { parent: Buffer.alloc(0), hashes: packed(chain, count) };
      const { offsets } = await client.call({ $case: 'reserve', value: request }, 'reserved');
      for (const [index, offset] of offsets.entries()) native.arenaWrite(arena, Number(offset), bytesOf(chain, index));
      const checksums = [...(await native.arenaChecksum(arena, Float64Array.from(offsets, Number), payloadBytes))];
      await client.call({ $case: 'commit', value: { offsets, checksums } }, 'done');
    },
    /** Blocks that came, all of them checked. */
    async read(chain: string): Promise<number> {
      const load = client.send({ $case: 'load', value: { hashes: packed(chain, count), deadlineMs: 10_000 } });
      const { loaded } = await client.answer(load, 'loadDone');
      for (let next = 0; next < loaded; ) {
        const { first, offsets } = await client.answer(load, 'ready');
        for (const [index, offset] of offsets.entries()) {
          const bytes = native.arenaRead(arena, Number(offset), payloadBytes);
          expect(bytes.equals(bytesOf(chain, first + index))).toBe(true);
        }
        next += offsets.length;
      }
      if (loaded > 0) await client.call({ $case: 'release', value: { loadId: load, corrupt: [] } }, 'done');
      return loaded;
    },
    held: async (chain: string) =>
      client.call({ $case: 'lookup', value: { hashes: packed(chain, count) } }, 'lookup').then(({ spans }) => spans),
    async end(): Promise<void> {
      await client.end();
      native.arenaClose(arena);
    },
  };
}
