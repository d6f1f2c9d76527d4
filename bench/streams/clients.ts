/**
 * A process with many clients, each with one answer after another, through a coordinator (TARGET is its URL) or straight from the fake
 * engines (TARGET is their folder). Arguments: TARGET CLIENTS SECONDS ANSWER_TOKENS PROMPT_TOKENS ENGINES. Prints one line of JSON.
 */
import { Agent, request } from 'node:http';
import { channelOptions, clientCredentials, EngineClient, type GenerateEvent } from '@kvtier/wire/grpc';
import { since } from './stamp.ts';

const [target, clients, seconds, answerTokens, promptTokens, engines] = process.argv.slice(2) as [string, ...string[]];
const endMs = performance.now() + Number(seconds) * 1_000;
/** Of what comes before all clients have begun, nothing counts. */
const countsFromMs = performance.now() + 2_000;

/** Counts by tens of microseconds. */
class Times {
  readonly #counts = new Float64Array(200_000);
  #count = 0;

  add(us: number): void {
    if (performance.now() < countsFromMs) return;
    this.#counts[Math.min(Math.max(Math.round(us / 10), 0), this.#counts.length - 1)]!++;
    this.#count++;
  }

  /** Milliseconds. */
  at(share: number): number {
    let left = this.#count * share;
    for (let i = 0; i < this.#counts.length; i++) {
      left -= this.#counts[i]!;
      if (left <= 0) return i / 100;
    }
    return Number.NaN;
  }

  get told() {
    return { count: this.#count, p50: this.at(0.5), p90: this.at(0.9), p99: this.at(0.99), p999: this.at(0.999) };
  }
}

const [first, way, gaps] = [new Times(), new Times(), new Times()];
let tokens = 0;
let answers = 0;
const errors = new Map<string, number>();

/** One answer's tokens as they come. */
class Reader {
  readonly #begunMs = performance.now();
  #lastMs = 0;

  token(stamped: number): void {
    const nowMs = performance.now();
    if (nowMs >= countsFromMs) tokens++;
    if (this.#lastMs === 0) first.add((nowMs - this.#begunMs) * 1_000);
    else gaps.add((nowMs - this.#lastMs) * 1_000);
    way.add(since(stamped));
    this.#lastMs = nowMs;
  }
}

const prompt = (client: number): number[] =>
  Array.from({ length: Number(promptTokens) }, (_, i) => 3 + ((client + i * 7) % 3_000));

function throughCoordinator(): (client: number) => Promise<void> {
  const agent = new Agent({ keepAlive: true, maxSockets: Number(clients) });
  const url = new URL(target);
  const mark = '"token_ids":[';
  return (client) =>
    new Promise((resolve, reject) => {
      const reader = new Reader();
      const body = JSON.stringify({
        prompt: prompt(client),
        max_tokens: Number(answerTokens),
        stream: true,
        return_token_ids: true,
        temperature: 0,
      });
      const headers = { 'content-type': 'application/json', 'content-length': Buffer.byteLength(body) };
      const asked = request(
        { agent, host: url.hostname, port: url.port, method: 'POST', path: '/v1/completions', headers },
        (response) => {
          if (response.statusCode !== 200) {
            response.resume();
            reject(new Error(`status ${response.statusCode}`));
            return;
          }
          let rest = '';
          let done = false;
          response.setEncoding('latin1').on('data', (text: string) => {
            rest += text;
            for (let at = rest.indexOf('\n\n'); at !== -1; at = rest.indexOf('\n\n')) {
              const event = rest.slice(0, at);
              rest = rest.slice(at + 2);
              const ids = event.indexOf(mark);
              if (ids !== -1) reader.token(Number(event.slice(event.indexOf(',', ids) + 1, event.indexOf(']', ids))));
              else if (event === 'data: [DONE]') done = true;
              else if (event.includes('"error"')) reject(new Error(event.slice(0, 200)));
            }
          });
          response.once('end', () => (done ? resolve() : reject(new Error('cut'))));
          response.once('error', reject);
        },
      );
      asked.once('error', reject);
      asked.end(body);
    });
}

function straight(): (client: number) => Promise<void> {
  const lines = Array.from({ length: Number(engines) }, (_, i) => {
    const address = `unix:${target}/e${i}`;
    const options = { ...channelOptions, 'grpc.use_local_subchannel_pool': 1 };
    return new EngineClient(address, clientCredentials(address), options);
  });
  return (client) =>
    new Promise((resolve, reject) => {
      const reader = new Reader();
      const call = lines[client % lines.length]!.generate({
        requestId: `${client}`,
        promptTokenIds: prompt(client),
        maxTokens: Number(answerTokens),
        temperature: 0,
        topK: 0,
        topP: 1,
        ignoreEos: false,
        stopTokenIds: [],
        cacheSalt: '',
        loraName: '',
      });
      call.on('data', ({ tokenIds }: GenerateEvent) => reader.token(tokenIds[1]!));
      call.once('end', resolve);
      call.once('error', reject);
    });
}

const ask = target.startsWith('http') ? throughCoordinator() : straight();
async function run(client: number): Promise<void> {
  // Not all in one moment: they come over the first second.
  await new Promise((resolve) => setTimeout(resolve, (client * 1_000) / Number(clients)));
  while (performance.now() < endMs) {
    try {
      await ask(client);
      answers++;
    } catch (error) {
      const { message } = error as Error;
      errors.set(message, (errors.get(message) ?? 0) + 1);
    }
  }
}

const cpuBefore = process.cpuUsage();
await Promise.all(Array.from({ length: Number(clients) }, (_, client) => run(client)));
const { user, system } = process.cpuUsage(cpuBefore);
const told = {
  tokens,
  answers,
  errors: Object.fromEntries(errors),
  first: first.told,
  way: way.told,
  gaps: gaps.told,
  cpuS: (user + system) / 1e6,
};
process.stdout.write(`${JSON.stringify(told)}\n`);
process.exit(0);
