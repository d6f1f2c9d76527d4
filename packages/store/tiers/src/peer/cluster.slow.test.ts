/** Three nodes, each a process: what one fetched, it gives; so a chain outlives the node that computed it. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { bundled } from '../../../../../scripts/lib/test-programs.mjs';

const [program] = await bundled(new URL('./testing/peer-node.ts', import.meta.url));
const payloadBytes = 1 << 20;

class Node {
  readonly child: ChildProcess;
  readonly #lines: AsyncIterator<string>;
  port = 0;

  constructor(dir: string, peers: readonly Node[]) {
    const args = [program, dir, String(payloadBytes), peers.map(({ port }) => port).join()];
    this.child = spawn(process.execPath, args, { stdio: ['pipe', 'pipe', 'inherit'] });
    this.#lines = createInterface({ input: this.child.stdout! })[Symbol.asyncIterator]();
  }

  static async start(dir: string, ...peers: readonly Node[]): Promise<Node> {
    const node = new Node(dir, peers);
    children.push(node.child);
    node.port = Number(await node.#answer());
    return node;
  }

  ask(question: string): Promise<unknown> {
    this.child.stdin!.write(`${question}\n`);
    return this.#answer();
  }

  async #answer(): Promise<unknown> {
    const { value, done } = await this.#lines.next();
    if (done === true) throw new Error('a node ended');
    return JSON.parse(value);
  }
}

let dir: string;
let children: ChildProcess[];
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-cluster-'));
  children = [];
});
afterEach(async () => {
  for (const child of children) {
    child.kill('SIGKILL');
    if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
  }
  rmSync(dir, { recursive: true });
});

it('what B got from A, C gets from B when A is killed in mid-transfer', async () => {
  const a = await Node.start(dir);
  await a.ask('hold 16');
  const b = await Node.start(dir, a);
  await b.ask('see 16 1');
  expect(await b.ask('fetch 12')).toEqual(Array(12).fill('ready'));
  const c = await Node.start(dir, a, b);
  await c.ask('see 16 2');
  const reading = c.ask('fetch 12');
  a.child.kill('SIGKILL');
  // Those that A did not deliver any more are asked for at B.
  expect(await reading).toEqual(Array(12).fill('ready'));
  await c.ask('see 12 1');
  expect(await c.ask('fetch 12')).toEqual(Array(12).fill('ready'));
  // B does not have them, and nobody does any more.
  expect((await c.ask('fetch 16')) as string[]).toEqual([...Array(12).fill('ready'), ...Array(4).fill('missing')]);
});
