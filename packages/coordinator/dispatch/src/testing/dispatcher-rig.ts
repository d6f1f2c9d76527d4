/** A dispatcher over made-up workers, and requests for it. Closed after each test. */
import { setMaxListeners } from 'node:events';
import { afterEach } from 'vitest';
import type { Choice, DispatchRequest } from '../choice.ts';
import { Dispatcher, type DispatcherOptions } from '../dispatcher.ts';
import { FakeHoldings, FakeWorkers } from './fake-workers.ts';

const opened: Dispatcher[] = [];
afterEach(() => {
  for (const dispatcher of opened.splice(0)) dispatcher.close();
});

export function rig(options: Partial<DispatcherOptions> = {}) {
  const workers = new FakeWorkers();
  const holdings = new FakeHoldings();
  const dispatcher = new Dispatcher({ workers, holdings, random: () => 0.5, ...options });
  opened.push(dispatcher);
  return { workers, holdings, dispatcher };
}

let count = 0;
export const request = (part: Partial<DispatchRequest> = {}): DispatchRequest => ({
  id: `r${count++}`,
  model: 'demo',
  among: undefined,
  except: new Set(),
  tokens: 160,
  blockTokens: 16,
  maxTokens: 16,
  keys: new Int32Array(20),
  session: '',
  ...part,
});
export const never = new AbortController().signal;
setMaxListeners(0, never); // all requests share it
export const nameOf = ({ worker }: Choice): string => worker.record.name;
