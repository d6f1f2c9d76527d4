/** A model that is replaced while an engine starts on it is refused with one line, or served under its own name: never another's. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it, vi } from 'vitest';
import type { BackendName } from './index.ts';
import type { Part, ReplacedModel, Way } from './testing/replaced-model.ts';

const moments = vi.hoisted(() => ({ current: undefined as import('./testing/replaced-model.ts').Moments | undefined }));

vi.mock('node:fs/promises', async (original) => {
  const real = await original<typeof import('node:fs/promises')>();
  const around = <T>(name: string, call: () => T): T => moments.current?.around(name, call) ?? call();
  const wrapped = (name: 'readFile' | 'stat' | 'realpath' | 'writeFile' | 'mkdir' | 'rename') =>
    ((...args: unknown[]) => around(name, () => (real[name] as (...all: unknown[]) => unknown)(...args))) as unknown;
  return {
    ...real,
    ...Object.fromEntries(
      (['readFile', 'stat', 'realpath', 'writeFile', 'mkdir', 'rename'] as const).map((name) => [name, wrapped(name)]),
    ),
    open: async (...args: Parameters<typeof real.open>) => {
      const handle = await around('open', () => real.open(...args));
      for (const name of ['stat', 'read'] as const) {
        const method = (handle[name] as (...all: unknown[]) => unknown).bind(handle);
        Object.assign(handle, { [name]: (...all: unknown[]) => around(`handle.${name}`, () => method(...all)) });
      }
      return handle;
    },
  };
});
vi.mock('./binding.ts', async (original) => {
  const real = await original<typeof import('./binding.ts')>();
  const wrapped = new Set(['digestFile', 'open']);
  return {
    ...real,
    binding: (name?: Parameters<typeof real.binding>[0]) =>
      new Proxy(real.binding(name), {
        get: (target, key) => {
          const value = Reflect.get(target, key) as (...all: unknown[]) => unknown;
          if (typeof key !== 'string' || !wrapped.has(key)) return value;
          return (...all: unknown[]) => moments.current?.around(`native.${key}`, () => value(...all)) ?? value(...all);
        },
      }),
  };
});

const cache = mkdtempSync(join(tmpdir(), 'kvtier-replaced-cache-'));
// Files run in one process after others, which have loaded the real modules: those of here are loaded anew, and again after it.
beforeAll(() => {
  vi.resetModules();
  vi.stubEnv('XDG_CACHE_HOME', cache);
});
afterAll(() => {
  vi.resetModules();
  vi.unstubAllEnvs();
  rmSync(cache, { recursive: true });
});

async function withModel<T>(backend: BackendName, use: (model: ReplacedModel) => Promise<T>): Promise<T> {
  const testing = await import('./testing/replaced-model.ts');
  const model = new testing.ReplacedModel(backend);
  try {
    return await use(model);
  } finally {
    moments.current?.end();
    model.remove();
  }
}

const line = /^MODEL: \S+: changed while it was loaded; start again$/;

describe.each<[Way, Part, 'first' | 'later', number, BackendName]>([
  ['rename', 'all', 'first', 1, 'cpu'],
  ['rewrite', 'all', 'first', 1, 'cpu'],
  ['rename', 'all', 'later', 2, 'cpu'], // the digests are known
  ['rename', 'shards', 'first', 3, 'cpu'],
  ['rewrite', 'config', 'first', 3, 'cpu'],
  ['rename', 'all', 'first', 7, 'cuda-emulated'],
  ['rewrite', 'all', 'later', 7, 'cuda-emulated'],
])('by %s, %s, at the %s start, every %i. moment, %s', (way, part, start, stride, backend) => {
  it('is refused with one line at every moment between its first byte and its last', { timeout: 60_000 }, async () => {
    const { Moments } = await import('./testing/replaced-model.ts');
    const current = new Moments();
    moments.current = current;
    const load = (at: number, replacing: Part | null = part): Promise<{ outcome: string; names: string[] }> =>
      withModel(backend, async (model) => {
        if (start === 'later') await model.load();
        current.start(at, () => replacing && model.replace(way, replacing));
        const outcome = await model.load();
        return { outcome, names: current.names };
      });
    const { names, outcome: before } = await load(Infinity, null);
    const { outcome: after } = await load(0);
    expect(before).toMatch(/^served [0-9a-f]{64} computes [0-9a-f]{64}$/);
    expect(after).toMatch(/^served/);
    expect(after).not.toBe(before);

    const outcomes = new Map<number, string>();
    for (let at = 0; at < names.length; at += stride) outcomes.set(at, (await load(at)).outcome);
    const others = [...outcomes].filter(([, outcome]) => outcome !== before && outcome !== after);
    expect(others.filter(([, outcome]) => !line.test(outcome)).map(([at, outcome]) => [names[at], outcome])).toEqual(
      [],
    );
    // Once its first file is open nothing but a refusal is possible, up to the last look at the folder.
    expect(others.length).toBeGreaterThan(10);
    expect(others.at(-1)![0]).toBeGreaterThan(names.lastIndexOf('during native.open') - stride);
  });
});
