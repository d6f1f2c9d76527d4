/**
 * Which bodies for pods one pod has to serve from the prompt to the answer. Two pods share what one `kv_transfer_params` names: the blocks
 * of one prompt, read once, by one sequence. A second prompt would be computed over the first one's blocks; a second answer would read
 * blocks that may be another prompt's by then; and of logprobs of the prompt the decode pod has those of the tokens that it computed.
 *
 * Values are taken as pods take them: vLLM and SGLang read `"2"`, `2.0` and `true` as numbers. Where that is not sure, it is one pod's.
 */
type Body = Readonly<Record<string, unknown>>;

const isAbsent = (value: unknown): boolean => value === undefined || value === null;
const isOff = (value: unknown): boolean => isAbsent(value) || value === false || value === 0;
const isSeveral = (value: unknown): boolean => Number(value ?? 1) > 1;
export const isEmpty = (value: unknown): boolean =>
  isAbsent(value) || value === false || (typeof value === 'object' && Object.keys(value as object).length === 0);

/** Why; one line of printable ASCII. undefined: two pods may share it. */
export function whyUnsplit(endpoint: 'completion' | 'chat', body: Body): string | undefined {
  if (!isEmpty(body.kv_transfer_params)) return 'the client gives kv_transfer_params';
  const { tool_choice: choice } = body;
  // The pod reads its answer as JSON, and one token is none.
  if (choice === 'required' || (typeof choice === 'object' && choice !== null))
    return 'tool_choice wants a whole call, and prefill gives one token';
  if (endpoint === 'completion' && promptsIn(body) > 1) return 'several prompts, and prefill gives the blocks of one';
  for (const name of ['n', 'best_of'])
    if (isSeveral(body[name])) return `${name} wants several answers, and what prefill lends is read once`;
  if (!isOff(body.use_beam_search)) return 'use_beam_search wants several answers, and what prefill lends is read once';
  return asksOfPrompt(endpoint, body)
    ? 'logprobs of the prompt are wanted, and the decode pod does not compute it'
    : undefined;
}

/** Prompts as text, ids or embeddings; pods answer those of both members. */
function promptsIn({ prompt, prompt_embeds: embeds }: Body): number {
  const ofText = Array.isArray(prompt) ? (typeof prompt[0] === 'number' ? 1 : prompt.length) : isAbsent(prompt) ? 0 : 1;
  return ofText + (Array.isArray(embeds) ? embeds.length : isAbsent(embeds) ? 0 : 1);
}

/** With `echo` the logprobs that are wanted of the answer are wanted of the prompt, too: in a chat `top_logprobs`, which is 0 by default. */
function asksOfPrompt(endpoint: 'completion' | 'chat', body: Body): boolean {
  if (!isAbsent(body.prompt_logprobs)) return true;
  if (isOff(body.echo)) return false;
  return endpoint === 'completion' ? !isAbsent(body.logprobs) : body.top_logprobs !== null;
}
