/** Load on a cluster: a list of requests once, or the same ones until it is enough. */
import { type Answer, ClusterRig, type Request } from './cluster-rig.ts';

/** `clients` at a time, in order, into `answers`; stops at the first that fails. */
export async function askAll(
  cluster: ClusterRig,
  all: readonly Request[],
  clients: number,
  answers: Answer[] = [],
): Promise<Answer[]> {
  let next = 0;
  const client = async (): Promise<void> => {
    while (next < all.length) {
      const at = next++;
      answers[at] = await cluster.ask(all[at]!);
    }
  };
  await Promise.all(Array.from({ length: clients }, client));
  return answers;
}

/** What one worker without a tier answers, as token ids. */
export async function answersAlone(all: readonly Request[], clients: number): Promise<readonly (readonly number[])[]> {
  const alone = await ClusterRig.start({ workers: 1, nodes: 0, coordinators: 1 });
  try {
    return (await askAll(alone, all, clients)).map(({ tokenIds }) => tokenIds);
  } finally {
    await alone.close();
  }
}

/** What a client waits before it asks again: what is judged is what becomes of requests, and a machine that is busy with others tells less. */
const pauseMs = 60;

/** `clients` that ask for as long as it runs, each the next soon after it has its answer. */
export class SteadyLoad {
  readonly answers: Answer[] = [];
  /** Rejects with the first failure. */
  readonly ended: Promise<unknown>;
  /** When each client asked what it has no answer to yet; infinite: it has one. */
  readonly #askedMs: number[] = [];
  /** When each client asked what it had its last answer to. */
  readonly #answeredMs: number[] = [];
  #running = true;

  /** `ask`: the request `at` of client `number`, checked. */
  constructor(clients: number, ask: (at: number, number: number) => Promise<Answer>) {
    const client = async (number: number): Promise<void> => {
      this.#answeredMs[number] = Number.NEGATIVE_INFINITY;
      for (let at = number; this.#running; at += clients) {
        this.#askedMs[number] = performance.now();
        this.answers.push(await ask(at, number));
        this.#answeredMs[number] = this.#askedMs[number];
        this.#askedMs[number] = Number.POSITIVE_INFINITY;
        await new Promise((resolve) => setTimeout(resolve, pauseMs));
      }
    };
    this.ended = Promise.all(Array.from({ length: clients }, (_, number) => client(number)));
    this.ended.catch(() => {}); // awaited by `stop`
  }

  /** Longest answer of those that were waited for after `sinceMs`, in ms from then on; also one that is not there yet. */
  longestSince(sinceMs: number): number {
    const nowMs = performance.now();
    const waited = this.answers.filter(({ endMs }) => endMs > sinceMs);
    const came = waited.map((each) => each.endMs - Math.max(sinceMs, each.startMs));
    return Math.max(0, ...came, ...this.#askedMs.map((askedMs) => nowMs - Math.max(sinceMs, askedMs)));
  }

  /** Each client has its answer to something that it asked after `sinceMs`. */
  allAskedSince(sinceMs: number): boolean {
    return this.#answeredMs.every((ms) => ms > sinceMs);
  }

  /** @throws what failed */
  async stop(): Promise<void> {
    this.#running = false;
    await this.ended;
  }
}
