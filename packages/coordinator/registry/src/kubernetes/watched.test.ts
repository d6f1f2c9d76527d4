/** Lists of an API server that lies; the rest is in kubernetes-discovery.slow.test.ts. */
import { expect, it, vi } from 'vitest';
import type { ApiServerLink } from './api-server-link.ts';
import { Watched } from './watched.ts';

it('a list that never ends is given up, and told', async () => {
  let pages = 0;
  const problems: (string | undefined)[] = [];
  const link = {
    get: async () => {
      pages++;
      await new Promise(setImmediate);
      return { metadata: { resourceVersion: '1', continue: 'more' }, items: [] };
    },
  } as unknown as ApiServerLink;
  const watched = new Watched({
    ...{ link, path: '/pods', labelSelector: 'app=x', parse: () => ({}), timeLimitMs: 1_000, watchSeconds: 1 },
    ...{ changed: () => {}, problem: (why: string | undefined) => void problems.push(why), ignored: () => {} },
  });
  await vi.waitUntil(() => problems.length > 0 || pages > 10_000, { timeout: 20_000, interval: 5 });
  expect(problems).toEqual(['the list of app=x does not end']);
  expect(watched.objects).toBe(undefined);
  await watched.close();
});
