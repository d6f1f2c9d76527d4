/**
 * The workers' own metrics, asked for over the lines that requests take: they have no port of their own for scraping. Of one worker as
 * it tells them; of several, each sample with the label `worker`.
 *
 * Bounded: so many workers, so many bytes of each, each within the deadline of a short question, and each in a turn of its own; asked once
 * however many ask us.
 */
import { setImmediate } from 'node:timers/promises';
import type { Worker } from '@kvtier/registry';
import type { Engines } from './engines.ts';

const maxWorkers = 64;
const maxChars = 1 << 20;

/** So long a text is good after it came. */
const keepMs = 250;

/** One collection at a time, for all who ask meanwhile and in the moment after it: what workers are asked does not grow with who asks. */
export class SharedMetrics {
  readonly #engines: Pick<Engines, 'workers' | 'engine'>;
  readonly #nowMs: () => number;
  #last: { readonly text: Promise<string>; goodUntilMs: number } | undefined;

  constructor(engines: Pick<Engines, 'workers' | 'engine'>, nowMs = (): number => performance.now()) {
    this.#engines = engines;
    this.#nowMs = nowMs;
  }

  text(): Promise<string> {
    if (this.#last === undefined || this.#nowMs() >= this.#last.goodUntilMs) {
      const last = { text: metricsOfWorkers(this.#engines), goodUntilMs: Number.POSITIVE_INFINITY };
      const ended = (): void => {
        last.goodUntilMs = this.#nowMs() + keepMs;
      };
      last.text.then(ended, ended);
      this.#last = last;
    }
    return this.#last.text;
  }
}

async function metricsOfWorkers(engines: Pick<Engines, 'workers' | 'engine'>): Promise<string> {
  const all = engines.workers().filter((worker) => worker?.record.kind === 'kvtier') as Worker[];
  const asked = all.filter(({ state }) => state === 'ready' || state === 'draining').slice(0, maxWorkers);
  const texts = await Promise.all(
    asked.map(({ number }) => (async () => engines.engine(number).metrics())().catch(() => '')),
  );
  if (all.length === 1) return (texts[0] ?? '').slice(0, maxChars);
  const families = new Map<string, Family>();
  for (const [i, text] of texts.entries()) {
    if (text.length <= maxChars) collect(families, text, asked[i]!.record.name);
    await setImmediate();
  }
  return [...families.values()].map(({ head, samples }) => [...head, ...samples].join('\n')).join('\n');
}

/** What Prometheus wants together: one metric's help, type and samples. */
interface Family {
  readonly head: string[];
  readonly samples: string[];
}

function collect(families: Map<string, Family>, text: string, worker: string): void {
  let family: Family | undefined;
  for (const line of text.split('\n')) {
    if (line === '') continue;
    const [, kind, name] = /^# (HELP|TYPE) (\S+)/.exec(line) ?? [];
    if (kind !== undefined) {
      family = families.get(name!);
      if (family === undefined) {
        family = { head: [], samples: [] };
        families.set(name!, family);
      }
      if (!family.head.some((known) => known.startsWith(`# ${kind} `))) family.head.push(line);
    } else if (!line.startsWith('#')) family?.samples.push(labelled(line, worker));
  }
}

/** `name{labels} value` or `name value`. A worker's name needs no escaping (`workerRecordSchema`). */
function labelled(sample: string, worker: string): string {
  const brace = sample.indexOf('{');
  if (brace !== -1) return `${sample.slice(0, brace)}{worker="${worker}",${sample.slice(brace + 1)}`;
  const space = sample.indexOf(' ');
  return `${sample.slice(0, space)}{worker="${worker}"}${sample.slice(space)}`;
}
