/**
 * Prefill and decode in different pods of a real vLLM, behind our coordinator (docs/handoff.md, "Pods of vLLM and SGLang"): the
 * connector and a cache node are the only link between them. `npm run test:vllm`.
 */
import { afterEach, describe, expect, it } from 'vitest';
import { Service } from '../faults/engine-rig.ts';
import { vllmMissing } from './engine.ts';
import { VllmPod } from './pod.ts';
import { patient, tell, VllmRig } from './rig.ts';

const missing = vllmMissing();
const minutes = (n: number): number => n * 60_000;
const count = 12;
const outputs = 8;

/** Words of no meaning, the same in every run, some 300 tokens each. */
const texts = Array.from({ length: count }, (_, at) =>
  Array.from({ length: 60 }, (_, word) => `item ${(at * 131 + word * 17) % 997}`).join(', '),
);

interface Answered {
  readonly text: string;
  readonly promptTokens: number;
  readonly handOff: string | null;
  readonly degraded: string | null;
}

async function ask(address: string, prompt: string, prefiller?: string): Promise<Answered> {
  const response = await fetch(`${address}/v1/completions`, {
    method: 'POST',
    headers: {
      'content-type': 'application/json',
      ...(prefiller !== undefined && { 'x-prefiller-host-port': prefiller }),
    },
    body: JSON.stringify({ model: 'demo', prompt, max_tokens: outputs, temperature: 0, ignore_eos: true }),
    signal: AbortSignal.timeout(120_000),
  });
  const said = await response.text();
  expect(response.status, said).toBe(200);
  const { choices, usage } = JSON.parse(said) as {
    choices: [{ text: string }];
    usage: { prompt_tokens: number };
  };
  const header = (name: string): string | null => response.headers.get(`x-kvtier-${name}`);
  return {
    text: choices[0].text,
    promptTokens: usage.prompt_tokens,
    handOff: header('handoff'),
    degraded: header('degraded'),
  };
}

describe.skipIf(missing !== null)('prefill and decode in two pods of a real vLLM', () => {
  let rig: VllmRig;
  let coordinator: Service | undefined;
  const pods: VllmPod[] = [];
  afterEach(async () => {
    await coordinator?.signal('SIGKILL');
    for (const pod of pods.splice(0)) await pod.kill();
    await rig.close();
  });

  it('the decode pod loads what the prefill pod computed, and answers go on without the prefill pod', {
    timeout: minutes(20),
  }, async () => {
    rig = new VllmRig();
    await rig.node.start();
    const [alone, prefill, decode] = await Promise.all([
      VllmPod.start(null),
      VllmPod.start(rig.socket, patient),
      VllmPod.start(rig.socket, patient),
    ]);
    pods.push(alone, prefill, decode);
    const right: Answered[] = [];
    for (const text of texts) right.push(await ask(alone.address, text));
    await alone.kill();

    coordinator = new Service('coordinator', {
      port: 0,
      podHandOff: { minUncachedTokens: 64 },
      discovery: {
        kind: 'static',
        workers: [
          { name: 'p', kind: 'openai', address: prefill.address, role: 'prefill' },
          { name: 'd', kind: 'openai', address: decode.address, role: 'decode' },
        ],
      },
      logLevel: 'warn',
    });
    await coordinator.start();
    const url = String(coordinator.ready[0]!.url);
    const isReady = async (): Promise<boolean> => {
      const { workers } = (await (await fetch(`${url}/health`)).json()) as { workers: { state: string }[] };
      return workers.filter(({ state }) => state === 'ready').length === 2;
    };
    await expect.poll(isReady, { timeout: 60_000 }).toBe(true);

    const before = await decode.counts();
    for (const [at, text] of texts.entries()) {
      // A pod that computes on the cores that others use may be late with its metrics, and then is silent for a moment.
      await expect.poll(isReady, { timeout: 60_000 }).toBe(true);
      const answer = await ask(url, text, new URL(prefill.address).host);
      expect(answer.handOff, coordinator.said).toBe('split P=p; why=named by x-prefiller-host-port');
      expect(answer.text).toBe(right[at]!.text);
      // Pods without KV events are routed without an index, which is said, too.
      expect(answer.degraded ?? '').not.toMatch(/^handoff/);
    }
    const after = await decode.counts();
    const whole = right.reduce((all, { promptTokens }) => all + Math.floor((promptTokens - 1) / 16) * 16, 0);
    const shown = after.pinsEnded - before.pinsEnded;
    tell(
      `pods: ${after.external - before.external} of ${whole} tokens came from the prefill pod, which need not pin ${shown} of ${count} prompts any more`,
    );
    expect(shown).toBe(count);
    expect(after.external - before.external).toBeGreaterThanOrEqual(0.95 * whole);

    // Without the prefill pod: the decode pod computes, or loads what is held.
    await prefill.kill();
    for (const at of [0, 1, 2]) {
      const fresh = `other words ${at}: ${texts[at]}`;
      expect((await ask(url, fresh)).text).toBe((await ask(decode.address, fresh)).text);
    }
  });
});
