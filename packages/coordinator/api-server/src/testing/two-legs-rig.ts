/** Pods with OpenAI's API behind a server that splits their requests, for tests: two that prefill, one that decodes, one store. */
import { PodHandOff } from '@kvtier/pod-handoff';
import { type PodStore, StorePod, wordsOf } from '@kvtier/registry/testing';
import { afterEach, beforeEach, vi } from 'vitest';
import { eventsOf, Harness } from './harness.ts';

export const patience = { timeout: 20_000 };
export const messages = [{ role: 'user', content: 'a long prompt '.repeat(60) }];
export const chat = { model: 'pods', messages, max_completion_tokens: 7, seed: 1 };
export const answerTo = (prompt: unknown): string => wordsOf(JSON.stringify(prompt)).join('');
export const bodiesOf = (pod: StorePod): Record<string, unknown>[] => pod.seen.map(({ body }) => JSON.parse(body));
export const header = (response: Response, name: string): string | null => response.headers.get(`x-kvtier-${name}`);
export const contentOf = async (response: Response): Promise<string> => {
  const { choices } = (await response.json()) as {
    choices: { text?: string; message?: { content: string } }[];
  };
  return choices[0]!.text ?? choices[0]!.message!.content;
};
export const textOfEvents = async (response: Response): Promise<string> =>
  ((await eventsOf(response)) as { choices?: { text?: string; delta?: { content?: string } }[] }[])
    .map(({ choices }) => choices?.[0]?.text ?? choices?.[0]?.delta?.content ?? '')
    .join('');

/** Registers the hooks. */
export function twoLegsRig() {
  const at = new Harness();
  const store: PodStore = new Set();
  const [p, p2, d] = [new StorePod(store, 'pods'), new StorePod(store, 'pods'), new StorePod(store, 'pods')];
  const pods = [p, p2, d];

  beforeEach(async () => {
    store.clear();
    for (const pod of pods) {
      pod.seen.length = 0;
      pod.computed.length = 0;
      pod.params = { do_remote_prefill: true, remote_engine_id: 'p', remote_block_ids: [[1, 2]] };
      pod.before = () => false;
      await pod.start();
    }
  });
  afterEach(async () => {
    for (const pod of pods) await pod.stop();
  });

  return {
    ...{ at, store, p, p2, d, pods },
    /** A server before these pods, with this configuration. */
    async open(names: readonly ('p' | 'p2' | 'd')[], config: object = {}): Promise<void> {
      const handOff = new PodHandOff({
        dispatch: { choose: (request, signal) => at.dispatcher.choose(request, signal) },
        pods: {
          workers: () => at.fleet.workers(),
          forward: (...all) => at.fleet.forward(...all),
        },
        config: { minUncachedTokens: 64, ...config },
      });
      await at.open({ pods: handOff });
      await at.workers(
        ...names.map((name) => ({
          ...{ name, kind: 'openai' as const, address: { p, p2, d }[name].address },
          role: name === 'd' ? ('decode' as const) : ('prefill' as const),
        })),
      );
      await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
      at.holdings.blocks.length = 0;
    },
    /** One that prefills, and two that decode. */
    withAlso: (other: StorePod): Promise<unknown> =>
      at.workers(
        { name: 'p', kind: 'openai', address: p.address, role: 'prefill' },
        { name: 'd', kind: 'openai', address: d.address, role: 'decode' },
        { name: 'e', kind: 'openai', address: other.address, role: 'decode' },
      ),
    ask: (body: object = chat, headers: Record<string, string> = {}, init: RequestInit = {}): Promise<Response> =>
      at.post('prompt' in body ? '/v1/completions' : '/v1/chat/completions', body, {
        headers: { 'content-type': 'application/json', ...headers },
        ...init,
      }),
    atRest: (): Promise<unknown> => vi.waitUntil(() => at.dispatcher.stats().given === 0, patience),
  };
}
