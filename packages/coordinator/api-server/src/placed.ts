/**
 * What the headers of an answer say: which workers have it, why, what they held of the prompt, and what was less than it should be.
 * As of the moment they are written, which is an answer's first token.
 */
import type { Choice } from '@kvtier/dispatch';
import type { HandedOff } from '@kvtier/handoff';

/** Of a request with many prompts, so many of its workers are named. */
const maxNamed = 8;
const maxHeaderChars = 512;

export class Placed {
  /** Conditions of the whole coordinator. */
  readonly #degraded: readonly string[];
  readonly #media: readonly string[];
  readonly #choices: Choice[] = [];
  readonly #handedOff = new Map<Choice, HandedOff>();
  #retries = 0;

  /** `media`: names of the KV index's media by their numbers. */
  constructor(degraded: readonly string[], media: readonly string[]) {
    this.#degraded = degraded;
    this.#media = media;
  }

  chosen(choice: Choice): void {
    if (this.#choices.length < maxNamed) this.#choices.push(choice);
  }

  /** Who computes its prompt; of the choices that are named. */
  handedOff(choice: Choice, state: HandedOff): void {
    if (this.#choices.includes(choice)) this.#handedOff.set(choice, state);
  }

  /** `choice` failed before it gave anything. */
  retried(choice: Choice): void {
    this.#retries++;
    const at = this.#choices.indexOf(choice);
    if (at !== -1) this.#choices.splice(at, 1);
    this.#handedOff.delete(choice);
  }

  /** `choice` failed like all others, the last of them, and what it said is the answer. */
  answered(choice: Choice): void {
    this.#retries--;
    this.chosen(choice);
  }

  /** Seconds to the first token as they were predicted of its worker, had that computed all of its prompt; undefined: none has it. */
  get predictedS(): number | undefined {
    return this.#choices[0]?.firstTokenS;
  }

  headers(): Record<string, string> {
    const [first] = this.#choices;
    const handedOff = this.#choices.flatMap((choice) => this.#handedOff.get(choice) ?? []);
    const prefills = new Set(handedOff.flatMap(({ prefill }) => prefill ?? []));
    const degraded = [
      ...this.#degraded,
      ...(this.#choices.some(({ isGuessed }) => isGuessed) ? ['index'] : []),
      ...new Set(handedOff.flatMap(({ degraded: why }) => why ?? [])),
      ...(this.#retries > 0 ? ['retried'] : []),
    ];
    return {
      ...(first && {
        'x-kvtier-worker': plain([...new Set(this.#choices.map(({ worker }) => worker.record.name))].join(', ')),
        'x-kvtier-policy': plain(first.policy),
        'x-kvtier-why': plain(first.why),
        'x-kvtier-held': plain(heldOf(first, this.#media)),
      }),
      ...(handedOff.length > 0 && { 'x-kvtier-handoff': plain(handedOff[0]!.line) }),
      ...(prefills.size > 0 && { 'x-kvtier-prefill-worker': plain([...prefills].join(', ')) }),
      ...(degraded.length > 0 && { 'x-kvtier-degraded': plain(degraded.join(', ')) }),
      ...(this.#retries > 0 && { 'x-kvtier-retries': String(this.#retries) }),
    };
  }
}

/** "12 blocks; gpu=8; cpu=4" */
function heldOf({ match: { blocks, byMedium } }: Choice, media: readonly string[]): string {
  let held = `${blocks} blocks`;
  for (const [medium, count] of byMedium.entries()) if (count > 0) held += `; ${media[medium] ?? medium}=${count}`;
  return held;
}

/** Whatever a name or a reason holds, a header is printable ASCII. */
const plain = (text: string): string => text.replace(/[^\x20-\x7e]/g, '?').slice(0, maxHeaderChars);
