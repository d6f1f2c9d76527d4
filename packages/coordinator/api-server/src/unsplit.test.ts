/** Bodies that one pod has to serve from the prompt to the answer, and those that look like them. */
import { describe, expect, it } from 'vitest';
import { answerTo, bodiesOf, chat, contentOf, header, messages, twoLegsRig } from './testing/two-legs-rig.ts';
import { whyUnsplit } from './unsplit.ts';

const { store, p, d, open, ask, atRest } = twoLegsRig();

const long = 'a long prompt '.repeat(60);
const ids = (from: number): number[] => Array.from({ length: 600 }, (_, i) => from + i);
const completion = { model: 'pods', prompt: long, max_tokens: 5 };

const several = 'several prompts, and prefill gives the blocks of one';
const answers = (name: string): string => `${name} wants several answers, and what prefill lends is read once`;
const ofPrompt = 'logprobs of the prompt are wanted, and the decode pod does not compute it';

describe('at two pods', () => {
  it.each<[string, object, string]>([
    ['two prompts', { ...completion, prompt: [long, 'b'.repeat(900)] }, several],
    ['token ids of two prompts', { ...completion, prompt: [ids(0), ids(1_000)] }, several],
    ['two answers', { ...completion, n: 2 }, answers('n')],
    ['two answers of a chat', { ...chat, n: 2 }, answers('n')],
    ['the best of two', { ...completion, best_of: 2 }, answers('best_of')],
    ['a beam', { ...completion, use_beam_search: true }, answers('use_beam_search')],
    ['logprobs of the prompt', { ...completion, prompt_logprobs: 0 }, ofPrompt],
    ['logprobs of a chat', { ...chat, prompt_logprobs: 1 }, ofPrompt],
    ['logprobs of an echo', { ...completion, echo: true, logprobs: 0 }, ofPrompt],
  ])('%s: prefill is not asked, and the decode pod gets the bytes as they came', async (_, body, why) => {
    await open(['p', 'd']);
    const response = await ask(body);
    expect([response.status, header(response, 'degraded'), p.seen.length]).toEqual([200, null, 0]);
    expect(header(response, 'handoff')).toBe(`none; why=${why}`);
    expect(d.seen.map((request) => request.body)).toEqual([JSON.stringify(body)]);
    await atRest();
  });

  it('nor where the decode pod was asked first, and held too little', async () => {
    await open(['p', 'd']);
    store.clear();
    const below = await ask({ ...chat, n: 2, cache_hit_threshold: 0.8 });
    expect(await contentOf(below)).toBe(answerTo(messages));
    expect(header(below, 'handoff')).toBe(`none; why=${answers('n')}`);
    expect([p.seen.length, bodiesOf(d).map((body) => body.cache_hit_threshold)]).toEqual([0, [0.8, 0]]);
    await atRest();
  });

  it('one prompt with one answer and its own logprobs is split', async () => {
    await open(['p', 'd']);
    const response = await ask({ ...chat, n: 1, logprobs: true, top_logprobs: 2 });
    expect([response.status, p.seen.length]).toEqual([200, 1]);
    expect(bodiesOf(d)[0]!.kv_transfer_params).toEqual(p.params);
    await atRest();
  });
});

describe('as pods read values', () => {
  it.each<[object, string]>([
    [{ prompt: [[1, 2], [3]] }, several],
    [{ prompt: [Uint32Array.of(1, 2), Uint32Array.of(3)] }, several],
    [{ prompt: ['a', [1]] }, several],
    [{ prompt: 'a', prompt_embeds: 'b' }, several],
    [{ prompt_embeds: ['a', 'b'] }, several],
    [{ prompt: 'a', n: '2' }, answers('n')],
    [{ prompt: 'a', n: 1, best_of: 3 }, answers('best_of')],
    [{ prompt: 'a', use_beam_search: 1 }, answers('use_beam_search')],
    [{ prompt: 'a', use_beam_search: 'true' }, answers('use_beam_search')],
    [{ prompt: 'a', prompt_logprobs: false }, ofPrompt],
    [{ prompt: 'a', prompt_logprobs: '0' }, ofPrompt],
    [{ prompt: 'a', echo: 'true', logprobs: true }, ofPrompt],
    [{ prompt: 'a', echo: true, logprobs: false }, ofPrompt],
    [{ prompt: 'a', kv_transfer_params: { a: 1 } }, 'the client gives kv_transfer_params'],
  ])('%j is one pod’s', (body, why) => expect(whyUnsplit('completion', body as Record<string, unknown>)).toBe(why));

  it.each<[object]>([
    [{ prompt: 'a' }],
    [{ prompt: ['a'] }],
    [{ prompt: [1, 2, 3] }],
    [{ prompt: [[1, 2, 3]] }],
    [{ prompt: Uint32Array.of(1, 2, 3) }],
    [{ prompt: [] }],
    [{ prompt_embeds: 'a', prompt: null }],
    [{ prompt: 'a', n: 1, best_of: 1, use_beam_search: false }],
    [{ prompt: 'a', n: null, best_of: null, use_beam_search: null, prompt_logprobs: null }],
    [{ prompt: 'a', n: '1' }],
    [{ prompt: 'a', n: 0 }],
    [{ prompt: 'a', n: 'many' }],
    [{ prompt: 'a', logprobs: 3 }],
    [{ prompt: 'a', echo: true }],
    [{ prompt: 'a', echo: true, logprobs: null }],
    [{ prompt: 'a', echo: false, logprobs: 3 }],
    [{ prompt: 'a', kv_transfer_params: {} }],
  ])('%j is not', (body) => expect(whyUnsplit('completion', body as Record<string, unknown>)).toBe(undefined));

  it('a chat’s own logprobs are of its answer; with echo they are of the prompt, too', () => {
    expect(whyUnsplit('chat', { messages, logprobs: true, top_logprobs: 5 })).toBe(undefined);
    expect(whyUnsplit('chat', { messages, echo: true })).toBe(ofPrompt);
    expect(whyUnsplit('chat', { messages, echo: true, top_logprobs: null })).toBe(undefined);
    // A list of texts is no batch in a chat.
    expect(whyUnsplit('chat', { messages, prompt: ['a', 'b'] })).toBe(undefined);
  });
});
