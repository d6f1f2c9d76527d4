/** What a reader tells when leases end that nobody was late for: a server of the test's own, whose clock and leases it sets. */
import { once } from 'node:events';
import { createServer, type Socket } from 'node:net';
import { workerRecordSchema } from '@kvtier/config';
import { afterEach, expect, it } from 'vitest';
import { MemberReader } from './index.ts';
import { Lines, memberServers } from './testing/index.ts';

const ends: (() => Promise<unknown>)[] = [];
afterEach(async () => {
  for (const end of ends.splice(0).reverse()) await end();
});

const pollMs = 20;
const bulk = (text: string): string => `$${text.length}\r\n${text}\r\n`;
const list = (parts: readonly string[]): string => `*${parts.length}\r\n${parts.join('')}`;

/** A list of members as the script that reads it answers. */
class Server {
  /** By name: when the lease ends, on its clock. */
  readonly leases = new Map<string, number>();
  readonly draining = new Set<string>();
  aheadMs = 0;
  looks = 0;
  /** By number, counted from 1: what happens before the look is answered. */
  readonly before = new Map<number, () => void>();
  readonly #sockets = new Set<Socket>();
  #port = 0;

  get nowMs(): number {
    return Date.now() + this.aheadMs;
  }

  get url(): string {
    return `redis://127.0.0.1:${this.#port}`;
  }

  lease(ms: number, ...names: string[]): void {
    for (const name of names) this.leases.set(name, this.nowMs + ms);
  }

  async listen(): Promise<this> {
    const server = createServer((socket) => {
      this.#sockets.add(socket);
      socket.on('error', () => {});
      // The client writes each command at once, an array of bulk strings.
      socket.on('data', (data) => {
        const lines = data.toString().split('\r\n');
        for (let i = 0; i + 1 < lines.length; ) {
          const count = Number(lines[i]!.slice(1));
          const name = lines[i + 2]!.toLowerCase();
          if (name === 'evalsha') socket.write(this.#look());
          else socket.write(name === 'info' ? bulk('role:master\r\n') : '+OK\r\n');
          i += 1 + 2 * count;
        }
      });
    });
    server.listen(0, '127.0.0.1');
    await once(server, 'listening');
    this.#port = (server.address() as { port: number }).port;
    ends.push(async () => {
      for (const socket of this.#sockets) socket.destroy();
      server.close();
    });
    return this;
  }

  #look(): string {
    this.before.get(++this.looks)?.();
    const now = this.nowMs;
    const live = [...this.leases].filter(([, endMs]) => endMs > now).map(([name]) => name);
    const records = live.map((name) =>
      JSON.stringify(workerRecordSchema.parse({ name, address: `${name}:1`, draining: this.draining.has(name) })),
    );
    const ids = list(live.map((name) => bulk(`worker:${name}`)));
    const texts = list(records.map((record) => bulk('0'.repeat(32) + record)));
    return list([bulk(`v${this.looks}`), `:${live.length}\r\n`, `:${now}\r\n`, ids, texts]);
  }
}

async function reading() {
  const server = await new Server().listen();
  const told: string[] = [];
  const problems: (string | undefined)[] = [];
  let tell: () => void = () => {};
  const reader = new MemberReader({
    redis: memberServers([server.url]),
    ...{ pollMs, log: new Lines() },
    changed: ({ workers }) => {
      told.push(workers.map(({ name }) => name).join());
      tell();
    },
    problem: (why) => problems.push(why),
  });
  ends.push(() => reader.close());
  /** The test's own limit ends a wait for what never comes. */
  const until = async (names: string): Promise<void> => {
    while (told.at(-1) !== names) {
      await new Promise<void>((resolve) => {
        tell = resolve;
      });
    }
  };
  return { server, told, problems, until };
}

it("a server's clock that goes ahead loses no member that renews its lease, and one that does not goes", async () => {
  const { server, told, problems, until } = await reading();
  server.lease(60_000, 'a', 'b', 'c');
  server.lease(3_600_000, 'd');
  await until('a,b,c,d');
  let atMs = 0;
  server.before.set(server.looks + 2, () => {
    server.aheadMs = 120_000;
    atMs = performance.now();
  });
  server.before.set(server.looks + 5, () => server.lease(3_600_000, 'a', 'b'));
  await until('a,b,d');
  // Its time to come back, in which the server was there.
  expect(performance.now() - atMs).toBeGreaterThan(1_900);
  expect([told, problems]).toEqual([['a,b,c,d', 'a,b,d'], []]);
});

it('a member whose lease ends by itself is gone at once', async () => {
  const { server, told, until } = await reading();
  server.lease(3_600_000, 'a', 'b', 'c');
  await until('a,b,c');
  server.before.set(server.looks + 1, () => server.leases.delete('a'));
  server.before.set(server.looks + 2, () => server.leases.delete('b'));
  await until('c');
  expect(told).toEqual(['a,b,c', 'b,c', 'c']);
});

it('leases of most members that end in one look are waited for once: as long as each takes to renew its own', async () => {
  const { server, told, until } = await reading();
  server.lease(3_600_000, 'a', 'b', 'c', 'd');
  server.draining.add('d');
  await until('a,b,c,d');
  const atMs = performance.now();
  server.before.set(server.looks + 1, () => server.leases.clear());
  server.before.set(server.looks + 2, () => server.lease(3_600_000, 'a'));
  await until('a');
  expect(performance.now() - atMs).toBeGreaterThan(150);
  // Who drains has said so.
  expect(told).toEqual(['a,b,c,d', 'a,b,c', 'a']);
});
