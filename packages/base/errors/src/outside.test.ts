import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { KvError, Outside, within } from './index.ts';

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());
const never = new Promise<never>(() => {});

describe('within', () => {
  it('is what the wait brings, and leaves no timer', async () => {
    await expect(within('a server', 50, async () => 7)).resolves.toBe(7);
    await expect(within('a server', 50, () => Promise.reject(new Error('no')))).rejects.toThrow('no');
    const thrown = within('a server', 50, () => {
      throw new Error('at once');
    });
    await expect(thrown).rejects.toThrow('at once');
    expect(vi.getTimerCount()).toBe(0);
  });

  it('ends at its limit, and tells what is still under way to stop', async () => {
    let told: AbortSignal | undefined;
    const waiting = within('a server', 50, (signal) => {
      told = signal;
      return never;
    });
    const ended = expect(waiting).rejects.toMatchObject({
      code: 'DEADLINE',
      retry: true,
      message: 'a server: no answer within 50 ms',
    });
    await vi.advanceTimersByTimeAsync(49);
    expect(told!.aborted).toBe(false);
    await vi.advanceTimersByTimeAsync(1);
    await ended;
    expect(told!.aborted).toBe(true);
  });

  it('a late answer or failure is nobody’s', async () => {
    let fail: (error: Error) => void = () => {};
    const call = new Promise<never>((_, reject) => {
      fail = reject;
    });
    const ended = expect(within('a server', 5, () => call)).rejects.toThrow(KvError);
    await vi.advanceTimersByTimeAsync(5);
    await ended;
    fail(new Error('late')); // an unhandled rejection would fail this file
    await vi.runAllTimersAsync();
  });

  it.each([0, -1, Number.NaN])('with %d ms left nothing is begun', async (limitMs) => {
    let begun = false;
    const refused = within('a server', limitMs, async () => {
      begun = true;
    });
    await expect(refused).rejects.toMatchObject({ code: 'DEADLINE' });
    expect(begun).toBe(false);
  });
});

describe('Outside', () => {
  it('gives its client to a call with a limit, and to what does not wait', async () => {
    const client = { name: 'one', hello: async () => 'hello', hang: () => never };
    const server = new Outside('a server', client);
    expect(server.now(({ name }) => name)).toBe('one');
    await expect(server.ask(50, (it) => it.hello())).resolves.toBe('hello');
    const hung = expect(server.ask(50, (it) => it.hang())).rejects.toMatchObject({ code: 'DEADLINE' });
    await vi.advanceTimersByTimeAsync(50);
    await hung;
    // @ts-expect-error: a promise without a limit
    void server.now((it) => it.hello());
  });
});
