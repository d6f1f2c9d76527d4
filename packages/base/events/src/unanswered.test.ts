/** A publisher that is asked in vain: nobody answers, snapshots alone are not told, or an answer begins and never gets further. */
import { KvError } from '@kvtier/errors';
import { describe, expect, it } from 'vitest';
import { Continuity, type StreamItem } from './continuity.ts';
import type { Replayed } from './replay-buffer.ts';

const batch = (seq: number) => ({ seq, topic: 'kv', payload: Buffer.from([seq]) });

async function all(items: AsyncIterable<StreamItem<{ readonly ts: number }>>): Promise<(number | string)[]> {
  const said: (number | string)[] = [];
  for await (const item of items) said.push(item.kind === 'batch' ? item.seq : item.kind);
  return said;
}

/** What it says when it is asked; `late`: nothing more comes. */
class Publisher {
  /** All waits for an answer, in their order. */
  readonly asked: (number | 'snapshot')[] = [];
  says: (from: number) => Iterable<number | 'late' | Replayed> = () => ['late'];
  tells: () => Iterable<number | 'late' | Replayed> = () => ['late'];
  readonly stream = new Continuity(
    (payload) => ({ ts: payload[0]! }),
    { replay: (from) => this.#answer(from, this.says(from)), snapshot: () => this.#answer('snapshot', this.tells()) },
    '',
  );

  async *#answer(asked: number | 'snapshot', parts: Iterable<number | 'late' | Replayed>): AsyncGenerator<Replayed> {
    this.asked.push(asked);
    for (const part of parts) {
      if (part === 'late') throw new KvError('DEADLINE', 'late');
      yield typeof part === 'number' ? batch(part) : part;
    }
  }
}

const none = (): [] => [];
const upTo = (last: number) => (from: number) =>
  Array.from({ length: Math.max(0, last + 1 - from) }, (_, i) => from + i);

describe('an answer that never gets further', () => {
  it('shows nothing: after two of them what was said before is void, once', async () => {
    const one = new Publisher();
    one.tells = none;
    one.says = (from) => [from, 'late'];
    const { stream } = one;
    expect(await all(stream.arrived(batch(0)))).toEqual([0]);
    stream.suspect();
    expect(await all(stream.probe())).toEqual([]); // it may be chance
    expect(await all(stream.probe())).toEqual(['gap']);
    // What comes after it counts, and is not told anew again and again.
    one.says = none;
    expect([await all(stream.arrived(batch(1))), stream.wantsProbe]).toEqual([[1], false]);
  });

  it('nor does one that says the same for ever', async () => {
    const one = new Publisher();
    one.tells = none;
    one.says = function* () {
      for (;;) yield 0;
    };
    expect(await all(one.stream.arrived(batch(0)))).toEqual([0]);
    expect([await all(one.stream.probe()), await all(one.stream.probe())]).toEqual([[], ['gap']]);
  });

  it('and one that gets on in between shows that nothing was missed up to there', async () => {
    const one = new Publisher();
    one.tells = none;
    const { stream } = one;
    expect(await all(stream.arrived(batch(0)))).toEqual([0]);
    for (let seq = 0; seq < 5; seq++) {
      one.says = (from) => [from, 'late'];
      expect(await all(stream.probe())).toEqual([]);
      one.says = upTo(seq + 1);
      expect(await all(stream.probe())).toEqual([seq + 1]);
    }
    expect(stream.counts.gaps).toBe(0);
  });
});

describe('a publisher that replays, and whose snapshot is late when it is needed', () => {
  const range = (from: number, to: number) => Array.from({ length: to - from + 1 }, (_, at) => from + at);
  async function told(): Promise<Publisher> {
    const one = new Publisher();
    one.tells = () => [batch(4)];
    one.says = none;
    expect(await all(one.stream.probe())).toContain('snapshot');
    one.tells = () => ['late'];
    one.says = (from) => range(Math.max(from, 50), 100);
    return one;
  }

  it('loses nothing that it replays behind a hole', async () => {
    const { stream } = await told();
    await all(stream.arrived(batch(100)));
    expect(stream.wantsProbe).toBe(true);
    expect((await all(stream.probe())).filter((said) => said !== 'gap')).toEqual(range(50, 100));
  });

  it('nor where nothing can show that it is the same life', async () => {
    const one = await told();
    one.says = (from) => range(from, 7);
    one.stream.suspect();
    await all(one.stream.arrived(batch(7)));
    expect((await all(one.stream.probe())).filter((said) => said !== 'gap')).toEqual(range(0, 7));
  });
});

describe('a publisher that answers replays and tells no snapshot', () => {
  it('is waited for once; what it says is there, lost or not', async () => {
    const one = new Publisher();
    one.says = upTo(0);
    const { stream, asked } = one;
    expect(await all(stream.arrived(batch(0)))).toEqual([0]);
    expect(await all(stream.probe())).toEqual([]);
    expect(asked).toEqual(['snapshot']);
    one.says = upTo(1); // lost on its way
    expect(await all(stream.probe())).toEqual([1]);
    expect([stream.counts.unanswered, stream.wantsProbe, stream.awaitsSnapshot]).toEqual([0, false, true]);
    one.says = upTo(3);
    expect(await all(stream.arrived(batch(3)))).toEqual([2, 3]);
    stream.suspect();
    expect(await all(stream.probe())).toEqual([]);
    expect(asked.filter((from) => from === 'snapshot')).toEqual(['snapshot']);
  });

  it('is asked for one again when others have heard that it tells it', async () => {
    const one = new Publisher();
    const { stream, asked } = one;
    await all(stream.arrived(batch(0)));
    await all(stream.probe());
    one.says = upTo(0);
    await all(stream.probe());
    one.tells = () => [{ ...batch(9), seq: 1 }];
    stream.tells();
    expect([await all(stream.probe()), stream.awaitsSnapshot]).toEqual([['snapshot', 1], false]);
    expect(asked).toEqual(['snapshot', 0, 'snapshot', 1]);
  });

  it('does not show by being there that nothing was missed', async () => {
    const one = new Publisher();
    const { stream } = one;
    await all(stream.arrived(batch(0)));
    expect(await all(stream.probe())).toEqual([]);
    stream.tells();
    expect(await all(stream.probe())).toEqual(['gap']);
  });
});

describe('what comes waits for one silence', () => {
  it('where one joins late', async () => {
    const { stream, asked } = new Publisher();
    expect(await all(stream.probe())).toEqual([]);
    expect(await all(stream.arrived(batch(9)))).toEqual(['gap', 9]);
    expect(asked).toEqual(['snapshot']);
  });

  it('where nothing can show that it is the same life', async () => {
    const one = new Publisher();
    const { stream, asked } = one;
    one.says = none;
    one.tells = () => [{ ...batch(1), seq: 5 }];
    expect(await all(stream.probe())).toEqual(['snapshot', 5]);
    one.tells = () => ['late'];
    one.says = () => ['late'];
    stream.suspect();
    asked.length = 0;
    expect([await all(stream.probe()), asked]).toEqual([['gap'], ['snapshot']]);
    expect(stream.counts.unanswered).toBe(1);
    // What it held before is told once it answers.
    one.says = upTo(7);
    expect(await all(stream.probe())).toEqual([0, 1, 2, 3, 4, 5, 6, 7]);
  });

  it('where a hole is to be filled', async () => {
    const { stream, asked } = new Publisher();
    await all(stream.arrived(batch(0)));
    expect(await all(stream.arrived(batch(2)))).toEqual(['gap', 2]);
    expect(await all(stream.arrived(batch(4)))).toEqual(['gap', 4]);
    expect(asked).toEqual([0]);
  });
});
