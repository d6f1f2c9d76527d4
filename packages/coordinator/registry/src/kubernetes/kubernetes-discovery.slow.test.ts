/** Discovery in Kubernetes: the conformance suite, and servers that are slow, cut off, forgetful, strict or wrong. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import type { ServerResponse } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Lines } from '@kvtier/membership/testing';
import fc from 'fast-check';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest';
import { makeCertificate } from '../../../../../infra/redis/servers.ts';
import { createDiscovery, type Discovery } from '../index.ts';
import { discoveryConformance, Heard, type Source, workerNamed } from '../testing/discovery-conformance.ts';
import { type Asked, KubeServer, refuse } from '../testing/kube-server.ts';
import { kubernetesConfig, podOf, servingLabel } from '../testing/kube-source.ts';

let dir: string;
beforeAll(() => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-kube-'));
});
afterAll(() => rmSync(dir, { recursive: true, force: true }));

describe('kubernetes discovery', () => {
  discoveryConformance(async (): Promise<Source> => {
    const server = new KubeServer(dir);
    await server.start();
    const pods = new Map<string, ReturnType<typeof podOf>>();
    const put = (pod: ReturnType<typeof podOf>): void => {
      pods.set(pod.metadata.name, pod);
      server.put('pods', pod);
    };
    return {
      open: (log) => createDiscovery(kubernetesConfig({ kubeconfig: server.kubeconfig(), timeLimitMs: 1_000 }), log),
      join: async (worker, node) => put(podOf(worker, node)),
      drain: async (name) => {
        const pod = pods.get(name)!;
        put({ ...pod, metadata: { ...pod.metadata, deletionTimestamp: '2026-01-01T00:00:00Z' } });
      },
      leave: async (name) => server.remove('pods', name),
      twin: async (worker, log) => {
        put(podOf({ ...worker, name: `${worker.name}-twin` }));
        await log.until(/a member is ignored/);
      },
      nonsense: async (name) => {
        const pod = podOf(workerNamed(name));
        put({ ...pod, metadata: { ...pod.metadata, annotations: { 'kvtier.io/ports': 'http' } } });
      },
      outage: { down: () => server.stop(), up: () => server.start() },
      close: () => server.stop(),
    };
  });
});

describe('a server that', () => {
  let server: KubeServer;
  let heard: Heard;
  let lines: Lines;
  let discovery: Discovery | undefined;
  const more: Discovery[] = [];
  beforeEach(async () => {
    server = new KubeServer(dir);
    await server.start();
    heard = new Heard();
    lines = new Lines();
  });
  afterEach(async () => {
    await discovery?.close();
    for (const each of more.splice(0)) await each.close();
    await server.stop();
  });
  const open = async (change: object = {}): Promise<void> => {
    const config = kubernetesConfig({ kubeconfig: server.kubeconfig(), timeLimitMs: 1_000, ...change });
    discovery = createDiscovery(config, lines);
    await discovery.start(heard);
  };
  const join_ = (...names: string[]): void => {
    for (const name of names) server.put('pods', podOf(workerNamed(name)));
  };
  const names = async (...wanted: string[]): Promise<void> =>
    await heard.until(() => heard.members !== undefined && heard.names.join() === wanted.join(), wanted.join());
  const watching = async (): Promise<void> => await settled(() => server.watcherCount === 1);
  const asked = (verb: 'list' | 'watch'): Asked[] => server.asked.filter((each) => each.verb === verb);
  /** The first `times` questions of a kind are dealt with otherwise. */
  const fault = (
    verb: 'list' | 'watch',
    times: number,
    deal: (response: ServerResponse, asked: Asked) => void,
  ): void => {
    let left = times;
    server.fault = (each, response) => {
      if (each.verb !== verb || left-- <= 0) return false;
      deal(response, each);
      return true;
    };
  };

  it('has many pods: lists come in pages', async () => {
    const many = Array.from({ length: 250 }, (_, i) => `w-${String(i).padStart(3, '0')}`);
    for (const [i, name] of many.entries()) {
      server.put('pods', podOf(workerNamed(name, { address: `http://10.0.${i >> 7}.${1 + (i & 127)}:8000` })));
    }
    server.put('pods', { metadata: { name: 'other', labels: { app: 'else' } }, status: { phase: 'Running' } });
    await open();
    await names(...many);
    expect(asked('list').map(({ query }) => [query.get('limit'), query.get('continue')?.split(':')[1]])).toEqual([
      ['100', undefined],
      ['100', '100'],
      ['100', '200'],
    ]);
    expect(asked('list')[0]!.query.get('labelSelector')).toBe('llm-d.ai/inference-serving=true');
    expect(heard.changes).toBe(1);
  });

  it('forgets while a list is read: it is read anew', async () => {
    for (let i = 0; i < 150; i++)
      server.put('pods', podOf(workerNamed(`w-${i}`, { address: `http://10.0.${i >> 7}.${1 + (i & 127)}:8000` })));
    let hasForgotten = false;
    server.fault = ({ query }) => {
      if (query.has('continue') && !hasForgotten) {
        hasForgotten = true;
        server.forget();
      }
      return false;
    };
    await open();
    await heard.until(() => heard.names.length === 150, 'all');
    expect(asked('list')).toHaveLength(4);
    expect(heard.problems).toEqual([undefined].slice(1));
  });

  it('says by bookmarks how far it is: a watch that is cut goes on from there', async () => {
    join_('a');
    await open();
    await names('a');
    await watching();
    server.put('pods', { metadata: { name: 'unseen', labels: { app: 'else' } } });
    server.bookmark();
    join_('b');
    await names('a', 'b');
    const from = asked('watch').at(-1)!.query.get('resourceVersion');
    server.bookmark();
    server.put('pods', { metadata: { name: 'unseen', labels: { app: 'other' } } });
    server.bookmark();
    server.endWatches();
    await settled(() => asked('watch').length === 2);
    expect(asked('watch')[0]!.query.get('allowWatchBookmarks')).toBe('true');
    expect(Number(asked('watch')[1]!.query.get('resourceVersion'))).toBe(Number(from) + 3);
    expect(asked('list')).toHaveLength(1);
    expect(heard.problems).toEqual([]);
  });

  it('ends each watch at its time: it is asked again, from where it was, and nothing is lost or a problem', async () => {
    await open({ watchSeconds: 1 });
    await names();
    for (const [i, name] of ['a', 'b', 'c'].entries()) {
      await settled(() => asked('watch').length > i);
      join_(name);
      await heard.until(() => heard.names.length === i + 1, name);
      await settled(() => asked('watch').length > i + 1);
    }
    expect(asked('list')).toHaveLength(1);
    expect(asked('watch')[0]!.query.get('timeoutSeconds')).toBe('1');
    expect(heard.problems).toEqual([]);
  });

  it.each(['status', 'event'] as const)(
    'remembers no more what was (410 as %s): all is listed anew',
    async (goneAs) => {
      join_('a', 'b');
      await open();
      await names('a', 'b');
      await watching();
      server.goneAs = goneAs;
      // Nobody hears of this.
      server.fault = ({ verb }, response) => {
        if (verb === 'watch') response.destroy();
        return verb === 'watch';
      };
      server.cut();
      await heard.until(() => heard.problems.at(-1) !== undefined, 'a problem');
      server.remove('pods', 'a');
      join_('c');
      server.forget();
      server.fault = undefined;
      await names('b', 'c');
      await heard.until(() => heard.problems.at(-1) === undefined, 'all is well');
      expect(asked('list')).toHaveLength(2);
    },
  );

  it('says nothing but 410: that is a problem, and no loop', async () => {
    join_('a');
    fault('watch', Number.POSITIVE_INFINITY, (response) => refuse(response, 410, 'too old'));
    await open();
    await names('a');
    await heard.until(() => heard.problems.length > 0, 'a problem');
    expect(heard.problems[0]).toBe('pods of serving cannot be followed (it answered 410: too old)');
    const { length } = server.asked;
    await new Promise((resolve) => setTimeout(resolve, 1_000));
    expect(server.asked.length - length).toBeLessThan(12);
    server.fault = undefined;
    await heard.until(() => heard.problems.at(-1) === undefined, 'all is well');
  });

  it.each([
    ['hangs before the head', () => {}],
    ['hangs in the middle', (response: ServerResponse) => void response.write('{"metadata":')],
    ['ends in the middle', (response: ServerResponse) => void response.end('{"metadata":')],
    ['is cut off in the middle', (response: ServerResponse) => response.write('{"meta', () => response.destroy())],
    ['is no list', (response: ServerResponse) => void response.end('{"kind":"Table"}')],
    ['is no JSON', (response: ServerResponse) => void response.end('<html>')],
    ['has no end', (response: ServerResponse) => flood(response)],
    ['is refused by a proxy', (response: ServerResponse) => void response.writeHead(502).end('<html>bad gateway')],
  ])('answers a list with one that %s: a problem of one line, and it is asked again', async (_, deal) => {
    join_('a');
    fault('list', 1, deal as (response: ServerResponse) => void);
    await open({ timeLimitMs: 500 });
    await heard.until(() => heard.problems.length > 0, 'a problem');
    expect(heard.problems[0]).toMatch(/^pods of serving cannot be followed \([^\n]{5,300}\)$/);
    await names('a');
    await heard.until(() => heard.problems.at(-1) === undefined, 'all is well');
  });

  it.each([
    ['hangs before its head', () => {}],
    ['is cut off', (response: ServerResponse) => response.write('{"type":"ADDED","obj', () => response.destroy())],
    ['ends in a line', (response: ServerResponse) => void response.end('{"type":"ADDED","obj')],
    ['is no watch', (response: ServerResponse) => void response.end('{"kind":"Status"}\n')],
    ['speaks of a strange event', (response: ServerResponse) => void response.end('{"type":"X","object":{}}\n')],
    [
      'fails',
      (response: ServerResponse) => void response.end('{"type":"ERROR","object":{"code":500,"message":"etcd"}}\n'),
    ],
    ['has a line without end', (response: ServerResponse) => flood(response)],
  ])('answers a watch with one that %s: a problem of one line, and nothing is lost', async (_, deal) => {
    join_('a');
    fault('watch', 1, (response) => {
      response.statusCode = 200;
      join_('b');
      (deal as (response: ServerResponse) => void)(response);
    });
    await open({ timeLimitMs: 2_000 });
    await heard.until(() => heard.problems[0] !== undefined, 'a problem');
    expect(heard.problems[0]).toMatch(/^pods of serving cannot be followed \([^\n]{4,300}\)$/);
    await names('a', 'b');
    await heard.until(() => heard.problems.at(-1) === undefined, 'all is well');
    expect(asked('list')).toHaveLength(1);
  });

  it('has a watch that stands still for ever: it is noticed by its time, and nothing is lost', async () => {
    join_('a');
    fault('watch', 1, (response) => void response.writeHead(200).flushHeaders());
    await open({ watchSeconds: 1, timeLimitMs: 2_000 });
    await names('a');
    join_('b');
    await names('a', 'b');
    await heard.until(() => heard.problems.at(-1) === undefined && heard.problems.length > 1, 'all is well');
    expect(heard.problems[0]).toBe('pods of serving cannot be followed (kubernetes: no answer within 3000 ms)');
    expect(asked('list')).toHaveLength(1);
  });

  it('asks for patience: it is asked no sooner', async () => {
    const times: number[] = [];
    fault('list', 1, (response) => {
      times.push(performance.now());
      refuse(response, 429, 'too many requests', { 'retry-after': '1' });
    });
    join_('a');
    await open();
    await names('a');
    times.push(performance.now());
    await heard.until(() => heard.problems.length > 1, 'all is well');
    expect(times[1]! - times[0]!).toBeGreaterThan(990);
    expect(heard.problems).toEqual([
      'pods of serving cannot be followed (it answered 429: too many requests)',
      undefined,
    ]);
  });

  it('knows neither our token, nor we its certificate: one line each, with what to do', async () => {
    await open({ kubeconfig: server.kubeconfig({ token: 'wrong' }) });
    await heard.until(() => heard.problems.length > 0, 'a problem');
    expect(heard.problems[0]).toBe(
      'pods of serving cannot be followed (it answered 401: Unauthorized; correct the credentials of the kubeconfig, or mount a service account token)',
    );
    const other = mkdtempSync(join(dir, 'other-'));
    const wrong = createDiscovery(
      kubernetesConfig({ kubeconfig: server.kubeconfig({ caFile: makeCertificate(other).certFile }) }),
      lines,
    );
    more.push(wrong);
    const also = new Heard();
    await wrong.start(also);
    await also.until(() => also.problems.length > 0, 'a problem');
    expect(also.problems[0]).toMatch(/^pods of serving cannot be followed \(.*certificate.*\)$/);
    expect(heard.changes + also.changes).toBe(0);
  });

  it('has pods that cannot be read among others: each is ignored in one line', async () => {
    join_('a');
    server.put('pods', { metadata: { name: 'strange', labels: servingLabel }, status: { podIP: 'ten' } });
    await open();
    await names('a');
    await watching();
    server.put('pods', {
      metadata: { name: 'strange', labels: servingLabel },
      status: { podIP: 'ten', phase: 'Failed' },
    });
    server.put('pods', { metadata: { name: 'a', labels: servingLabel }, status: 'gone' });
    join_('b');
    await names('b');
    expect(lines.all).toEqual([
      'warn a member is ignored {"member":"pod strange","reason":"status.podIP: Invalid input"}',
      'warn a member is ignored {"member":"pod a","reason":"status: Invalid input: expected object, received string"}',
    ]);
    expect(heard.problems).toEqual([]);
  });

  it('has EndpointSlices, which are followed with the pods', async () => {
    const slice = (ready: boolean, ...pods: string[]) => ({
      metadata: { name: 's', labels: { 'kubernetes.io/service-name': 'engines' } },
      endpoints: pods.map((name) => ({
        addresses: [new URL(workerNamed(name).address).hostname],
        conditions: { ready },
        targetRef: { kind: 'Pod', name },
      })),
      ports: [{ name: 'http', port: 8000, protocol: 'TCP' }],
    });
    join_('a', 'b');
    server.put('endpointslices', slice(true, 'a'));
    await open({ endpointSlices: 'kubernetes.io/service-name=engines' });
    await names('a');
    server.put('endpointslices', slice(true, 'a', 'b'));
    await names('a', 'b');
    server.put('endpointslices', slice(false, 'a', 'b'));
    await heard.until(() => heard.members!.workers.every(({ draining }) => draining), 'draining');
    server.remove('pods', 'a');
    await names('b');
    server.remove('endpointslices', 's');
    await names();
    expect(server.asked.map(({ kind }) => kind)).toContain('endpointslices');
  });

  it('is anything but reliable: at quiet it is known what there is', async () => {
    const step = fc.oneof(
      {
        weight: 6,
        arbitrary: fc.record({
          does: fc.constant('put' as const),
          pod: fc.nat(7),
          role: fc.constantFrom('both', 'decode'),
        }),
      },
      { weight: 3, arbitrary: fc.record({ does: fc.constant('remove' as const), pod: fc.nat(7) }) },
      {
        weight: 2,
        arbitrary: fc.record({ does: fc.constantFrom('cut', 'forget', 'end', 'bookmark', 'wait', 'half') }),
      },
    );
    const run = fc.asyncProperty(fc.array(step, { minLength: 20, maxLength: 60 }), async (steps) => {
      const other = new KubeServer(dir);
      await other.start();
      const own = new Heard();
      const log = new Lines();
      const found = createDiscovery(kubernetesConfig({ kubeconfig: other.kubeconfig(), timeLimitMs: 1_000 }), log);
      await found.start(own);
      const truth = new Map<string, string>();
      try {
        for (const step of steps) {
          if (step.does === 'put') {
            const name = `w-${step.pod}`;
            other.put('pods', podOf(workerNamed(name, { role: step.role as 'both' | 'decode' })));
            truth.set(name, step.role);
          } else if (step.does === 'remove') {
            other.remove('pods', `w-${step.pod}`);
            truth.delete(`w-${step.pod}`);
          } else if (step.does === 'cut') other.cut();
          else if (step.does === 'forget') other.forget();
          else if (step.does === 'end') other.endWatches();
          else if (step.does === 'bookmark') other.bookmark();
          else if (step.does === 'half') {
            other.say('{"type":"ADD');
            other.cut();
          } else await new Promise((resolve) => setTimeout(resolve, 10));
        }
        const wanted = [...truth].sort().join(';');
        const isSo = (): boolean =>
          own.members !== undefined && own.members.workers.map(({ name, role }) => [name, role]).join(';') === wanted;
        await own.until(isSo, wanted);
      } finally {
        await found.close();
        await other.stop();
      }
    });
    await fc.assert(run, { numRuns: 12 });
  });

  it('is not there to be found: CONFIG, in one line', async () => {
    const file = join(dir, 'no-kubeconfig');
    const start = (change: object): Promise<void> => {
      const found = createDiscovery(kubernetesConfig(change), lines);
      more.push(found);
      return found.start(heard);
    };
    await expect(start({ kubeconfig: file })).rejects.toMatchObject({
      code: 'CONFIG',
      message: expect.stringMatching(
        /^discovery: .*no-kubeconfig: ENOENT[^\n]*; name a kubeconfig with a reachable context$/,
      ),
    });
    writeFileSync(file, 'a: [');
    await expect(start({ kubeconfig: file })).rejects.toMatchObject({ code: 'CONFIG' });
    await expect(start({ kubeconfig: server.kubeconfig(), context: 'elsewhere' })).rejects.toMatchObject({
      code: 'CONFIG',
    });
    await expect(start({})).rejects.toMatchObject({
      code: 'CONFIG',
      message: expect.stringMatching(/this is no pod \(KUBERNETES_SERVICE_HOST is not set\)/),
    });
  });
});

async function settled(isSo: () => boolean): Promise<void> {
  while (!isSo()) await new Promise((resolve) => setTimeout(resolve, 5));
}

/** Bytes without a line feed, as long as somebody takes them. */
function flood(response: ServerResponse): void {
  const piece = Buffer.alloc(256 << 10, 'x');
  const pour = (): void => {
    while (!response.destroyed && response.write(piece));
    if (!response.destroyed) response.once('drain', pour);
  };
  pour();
}
