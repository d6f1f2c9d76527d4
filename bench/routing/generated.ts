/**
 * Kinds of load that the recorded traces lack, made up from a seed: so that a policy is not judged by three streams alone.
 *
 *   agents     long growing prompts of coding agents, with bursts of sub-agents that share their parent's beginning
 *   chats      short talks of a few turns, one short system prompt
 *   hot        one long system prompt before every question
 *   tenants    many tenants, few of them busy; each asks about documents of its own
 *   bursts     calm chat, and now and then a crowd that asks about one new document within seconds
 *   batch      prompts that share nothing, and answers of very different lengths
 *   long       one in twenty-five prompts is as long as two hundred others; some ask about one that is just being computed
 */
import type { Trace } from '../traces.ts';
import { seeded } from './seeded.ts';

const blockTokens = 64;

interface Request {
  readonly atMs: number;
  readonly blocks: readonly number[];
  readonly inputTokens: number;
  readonly outputTokens: number;
}

export const generatedNames = ['agents', 'chats', 'hot', 'tenants', 'bursts', 'batch', 'long'] as const;
export type GeneratedName = (typeof generatedNames)[number];

export function generated(name: GeneratedName, seed = 1): Trace {
  const world = new World(seed);
  makers[name](world);
  return world.trace(name);
}

/** Draws, and the requests that were made with them. */
class World {
  readonly #requests: Request[] = [];
  #blocks = 0;
  readonly random: () => number;

  constructor(seed: number) {
    this.random = seeded(seed);
  }

  /** A whole number from `least` to `most`. */
  between(least: number, most: number): number {
    return least + Math.floor(this.random() * (most - least + 1));
  }

  exponential(mean: number): number {
    return -mean * Math.log(1 - this.random());
  }

  /** Logarithms lie around the median's: half of all within 0.67 × `spread`. */
  around(median: number, spread: number): number {
    const normal = Math.sqrt(-2 * Math.log(1 - this.random())) * Math.cos(2 * Math.PI * this.random());
    return Math.ceil(median * Math.exp(spread * normal));
  }

  /** From 0 to `count` − 1, the k-th as often as 1 ÷ (k + 1). */
  zipf(count: number): number {
    return Math.min(count - 1, Math.floor((count + 1) ** this.random() - 1));
  }

  chance(share: number): boolean {
    return this.random() < share;
  }

  text(tokens: number): Text {
    return new Text([], 0).and(this, tokens);
  }

  fresh(blocks: number): number[] {
    return Array.from({ length: blocks }, () => this.#blocks++);
  }

  ask(atMs: number, prompt: Text, outputTokens: number): void {
    this.#requests.push({ atMs, blocks: prompt.blocks, inputTokens: prompt.tokens, outputTokens });
  }

  trace(name: string): Trace {
    const sorted = this.#requests.sort((a, b) => a.atMs - b.atMs);
    return {
      name,
      blockTokens,
      requests: sorted.map(({ blocks }) => Int32Array.from(blocks)),
      arrivalsMs: Float64Array.from(sorted, ({ atMs }) => atMs),
      inputTokens: Int32Array.from(sorted, ({ inputTokens }) => inputTokens),
      outputTokens: Int32Array.from(sorted, ({ outputTokens }) => outputTokens),
      uniqueBlocks: this.#blocks,
    };
  }
}

/** Tokens, by the blocks that are full. */
class Text {
  readonly blocks: readonly number[];
  readonly tokens: number;

  constructor(blocks: readonly number[], tokens: number) {
    this.blocks = blocks;
    this.tokens = tokens;
  }

  and(world: World, tokens: number): Text {
    const all = this.tokens + tokens;
    const more = Math.floor(all / blockTokens) - this.blocks.length;
    return new Text([...this.blocks, ...world.fresh(more)], all);
  }
}

const makers: Readonly<Record<GeneratedName, (world: World) => void>> = {
  agents(world) {
    const systems = [6_000, 11_000, 17_000].map((tokens) => world.text(tokens));
    for (let session = 0; session < 100; session++) {
      let atMs = world.random() * 200_000;
      let prompt = systems[world.zipf(systems.length)]!.and(world, world.between(300, 4_000));
      for (let turn = world.between(10, 50); turn > 0; turn--) {
        const answer = world.between(40, 400);
        world.ask(atMs, prompt, answer);
        if (world.chance(0.08)) {
          for (let helper = world.between(3, 8); helper > 0; helper--) {
            let own = prompt.and(world, world.between(200, 1_500));
            let helperMs = atMs + world.exponential(300);
            for (let step = world.between(1, 6); step > 0; step--) {
              world.ask(helperMs, own, world.between(40, 300));
              own = own.and(world, world.between(300, 3_000));
              helperMs += 1_000 + world.exponential(4_000);
            }
          }
        }
        prompt = prompt.and(world, answer + Math.ceil(world.exponential(900)));
        if (prompt.tokens > 120_000) break;
        atMs += 1_500 + world.exponential(world.chance(0.1) ? 40_000 : 5_000);
      }
    }
  },

  chats(world) {
    const system = world.text(320);
    for (let talk = 0; talk < 5_000; talk++) {
      let atMs = world.random() * 250_000;
      let prompt = system.and(world, world.between(20, 600));
      for (let turn = world.between(1, 6); turn > 0; turn--) {
        const answer = Math.ceil(world.exponential(180));
        world.ask(atMs, prompt, answer);
        prompt = prompt.and(world, answer + world.between(10, 200));
        atMs += 3_000 + world.exponential(20_000);
      }
    }
  },

  hot(world) {
    const system = world.text(12_000);
    for (let atMs = 0, i = 0; i < 3_000; i++, atMs += world.exponential(200))
      world.ask(atMs, system.and(world, world.between(60, 900)), Math.ceil(world.exponential(150)));
  },

  tenants(world) {
    const tenants = Array.from({ length: 60 }, () => {
      const system = world.text(world.between(300, 3_000));
      return Array.from({ length: 12 }, () => system.and(world, Math.ceil(2_000 + world.exponential(12_000))));
    });
    for (let atMs = 0, i = 0; i < 3_000; i++, atMs += world.exponential(200)) {
      const documents = tenants[world.zipf(tenants.length)]!;
      world.ask(
        atMs,
        documents[world.zipf(documents.length)]!.and(world, world.between(40, 400)),
        world.between(20, 300),
      );
    }
  },

  bursts(world) {
    const system = world.text(1_000);
    for (let atMs = 0; atMs < 600_000; atMs += world.exponential(350))
      world.ask(atMs, system.and(world, Math.ceil(world.exponential(3_000))), Math.ceil(world.exponential(200)));
    for (let atMs = 20_000; atMs < 600_000; atMs += 20_000 + world.exponential(30_000)) {
      const document = system.and(world, world.between(4_000, 30_000));
      for (let asked = world.between(20, 120); asked > 0; asked--)
        world.ask(atMs + world.exponential(2_500), document.and(world, world.between(20, 300)), world.between(20, 300));
    }
  },

  batch(world) {
    for (let atMs = 0, i = 0; i < 3_000; i++, atMs += world.exponential(200))
      world.ask(atMs, world.text(world.around(2_500, 0.9)), world.around(200, 0.7));
  },

  long(world) {
    const system = world.text(200);
    const documents: Text[] = [];
    for (let atMs = 0, i = 0; i < 2_500; i++, atMs += world.exponential(200)) {
      if (!world.chance(0.04)) {
        world.ask(atMs, system.and(world, world.around(400, 0.8)), Math.ceil(world.exponential(120)));
        continue;
      }
      if (documents.length === 0 || world.chance(0.5)) documents.unshift(world.text(world.between(60_000, 120_000)));
      const document = documents[world.zipf(Math.min(documents.length, 5))]!;
      world.ask(atMs, document.and(world, world.between(50, 500)), Math.ceil(world.exponential(500)));
    }
  },
};
