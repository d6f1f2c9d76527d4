/** What every way of discovery does alike. A source is the thing that it learns from, driven by the test. */
import type { Membership, NodeRecord, WorkerRecord } from '@kvtier/config';
import { Lines } from '@kvtier/membership/testing';
import type { Log } from '@kvtier/runtime';
import { afterEach, beforeEach, expect, it } from 'vitest';
import type { Discovery, DiscoveryListener } from '../discovery.ts';

export interface Source {
  open(log: Log): Discovery;
  /** A member comes, or (the same name) comes back as another one. The worker names its node. */
  join(worker: WorkerRecord, node?: NodeRecord): Promise<void>;
  drain(name: string): Promise<void>;
  leave(name: string): Promise<void>;
  /** A second member like the one that has joined. Fulfilled once somebody has said so in a line. */
  twin(worker: WorkerRecord, log: Lines): Promise<void>;
  /** Something that is no record. */
  nonsense(name: string): Promise<void>;
  /** The source is away, and back. Absent: it cannot be. */
  readonly outage?: { down(): Promise<void>; up(): Promise<void> };
  close(): Promise<void>;
}

/** Of a machine that does many other things. */
const limitMs = 20_000;

/** What a listener has heard. */
export class Heard implements DiscoveryListener {
  members: Membership | undefined;
  readonly problems: (string | undefined)[] = [];
  changes = 0;
  #waiting: (() => void)[] = [];

  changed(members: Membership): void {
    this.members = members;
    this.changes++;
    this.#wake();
  }

  problem(why: string | undefined): void {
    this.problems.push(why);
    this.#wake();
  }

  get names(): string[] {
    return this.members?.workers.map(({ name }) => name) ?? [];
  }

  async until(isSo: () => boolean, what: string): Promise<void> {
    const endMs = performance.now() + limitMs;
    while (!isSo()) {
      const leftMs = endMs - performance.now();
      if (leftMs <= 0)
        throw new Error(`${what}: not within ${limitMs} ms; heard ${JSON.stringify(this.members)}, ${this.problems}`);
      await new Promise<void>((resolve) => {
        const timer = setTimeout(resolve, leftMs);
        this.#waiting.push(() => {
          clearTimeout(timer);
          resolve();
        });
      });
    }
  }

  #wake(): void {
    for (const each of this.#waiting.splice(0)) each();
  }
}

/** As all three sources can have it. */
export const workerNamed = (name: string, change: Partial<WorkerRecord> = {}): WorkerRecord => ({
  ...{
    name,
    kind: 'openai',
    address: `http://10.0.0.${1 + (name.charCodeAt(name.length - 1) % 250)}:8000`,
    role: 'both',
  },
  ...{ draining: false, node: null, events: null, revision: '' },
  ...change,
});

export function discoveryConformance(make: () => Promise<Source>): void {
  let source: Source;
  let discovery: Discovery;
  let heard: Heard;
  let lines: Lines;
  beforeEach(async () => {
    source = await make();
    lines = new Lines();
    heard = new Heard();
    discovery = source.open(lines);
  });
  afterEach(async () => {
    await discovery.close();
    await source.close();
  });
  const expectMembers = async (workers: WorkerRecord[], nodes: NodeRecord[] = []): Promise<void> => {
    const wanted = JSON.stringify({ workers, nodes }, null, 1);
    const isSo = (): boolean => {
      const { workers, nodes } = heard.members ?? {};
      return JSON.stringify({ workers, nodes }, null, 1) === wanted;
    };
    await heard.until(isSo, wanted);
  };

  it('tells who is there, once, after start has returned', async () => {
    await source.join(workerNamed('b'));
    await source.join(workerNamed('a', { role: 'prefill', revision: 'r1' }));
    const started = discovery.start(heard);
    expect(heard.changes).toBe(0);
    await started;
    expect(heard.changes).toBe(0);
    await expectMembers([workerNamed('a', { role: 'prefill', revision: 'r1' }), workerNamed('b')]);
    expect(heard).toMatchObject({ changes: 1, problems: [] });
  });

  it('tells that nobody is there', async () => {
    await discovery.start(heard);
    await expectMembers([]);
  });

  it('a worker and its node join, change, drain and leave', async () => {
    await discovery.start(heard);
    await source.join(workerNamed('a'));
    await expectMembers([workerNamed('a')]);
    const node = {
      name: 'n',
      peer: { host: '10.0.0.9', port: 7100 },
      events: { endpoint: 'tcp://10.0.0.9:5560', replayEndpoint: 'tcp://10.0.0.9:5561', topic: '' },
    };
    const events = { endpoint: 'tcp://10.0.0.9:5557', replayEndpoint: 'tcp://10.0.0.9:5558', topic: 'kv@' };
    const beside = workerNamed('n', { address: 'http://10.0.0.9:8000', node: 'n', events, role: 'decode' });
    await source.join(beside, node);
    await expectMembers([workerNamed('a'), beside], [node]);
    await source.join(workerNamed('a', { role: 'decode', revision: 'r2' }));
    await expectMembers([workerNamed('a', { role: 'decode', revision: 'r2' }), beside], [node]);
    await source.drain('a');
    await expectMembers([workerNamed('a', { role: 'decode', revision: 'r2', draining: true }), beside], [node]);
    await source.leave('a');
    await expectMembers([beside], [node]);
    await source.leave('n');
    await expectMembers([]);
    expect(heard.problems).toEqual([]);
  });

  it('of two alike the first stays, and one line says so', async () => {
    await source.join(workerNamed('a'));
    await source.join(workerNamed('c'));
    await discovery.start(heard);
    await expectMembers([workerNamed('a'), workerNamed('c')]);
    await source.twin(workerNamed('a'), lines);
    await source.join(workerNamed('d'));
    await expectMembers([workerNamed('a'), workerNamed('c'), workerNamed('d')]);
    expect(lines.matching(/^(warn|error) .*(a member is ignored|not announced to the cluster)/)).toHaveLength(1);
  });

  it('what is no record is ignored, in one line, and disturbs nobody', async () => {
    await source.join(workerNamed('a'));
    await source.nonsense('bad');
    await discovery.start(heard);
    await expectMembers([workerNamed('a')]);
    await source.join(workerNamed('b'));
    await expectMembers([workerNamed('a'), workerNamed('b')]);
    expect(lines.matching(/^warn .*bad/)).toHaveLength(1);
    expect(heard.problems).toEqual([]);
  });

  it('closed, it tells nothing more; twice is as once', async () => {
    await discovery.start(heard);
    await expectMembers([]);
    await discovery.close();
    await discovery.close();
    const { changes } = heard;
    // Another one tells when there would have been something to tell.
    const other = source.open(lines);
    const witness = new Heard();
    await other.start(witness);
    await source.join(workerNamed('a'));
    await witness.until(() => witness.names.length === 1, 'the witness');
    await other.close();
    expect(heard.changes).toBe(changes);
  });

  it('closed before it has found anything', async () => {
    await source.outage?.down();
    await discovery.start(heard);
    await discovery.close();
    expect(heard.changes).toBe(0);
    await source.outage?.up();
  });

  it('starts while its source is away, says so, and finds it', async () => {
    const { outage } = source;
    if (outage === undefined) return;
    await outage.down();
    await discovery.start(heard);
    await heard.until(() => heard.problems.length > 0, 'a problem');
    expect(heard.problems[0]).toMatch(/^[^\n]{10,300}$/);
    expect(heard.changes).toBe(0);
    await outage.up();
    await source.join(workerNamed('a'));
    await expectMembers([workerNamed('a')]);
    await heard.until(() => heard.problems.at(-1) === undefined, 'all is well');
  });

  it('keeps the members while its source is away, and goes on after that', async () => {
    const { outage } = source;
    if (outage === undefined) return;
    await source.join(workerNamed('a'));
    await source.join(workerNamed('b'));
    await discovery.start(heard);
    await expectMembers([workerNamed('a'), workerNamed('b')]);
    await outage.down();
    await heard.until(() => heard.problems.at(-1) !== undefined, 'a problem');
    await outage.up();
    await heard.until(() => heard.problems.length > 0 && heard.problems.at(-1) === undefined, 'all is well');
    expect(heard).toMatchObject({ changes: 1, names: ['a', 'b'] });
    await source.join(workerNamed('c'));
    await expectMembers([workerNamed('a'), workerNamed('b'), workerNamed('c')]);
    await source.leave('b');
    await expectMembers([workerNamed('a'), workerNamed('c')]);
    expect(heard.changes).toBe(3);
  });
}
