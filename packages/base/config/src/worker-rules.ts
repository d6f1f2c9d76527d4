/**
 * What several keys of an engine worker's configuration tell together: a start could never go on with it, so that it is refused before
 * a weight is read. The scheduler, the server and the list of members refuse the same of whoever puts an engine together without a file.
 */
import type * as z from 'zod';
import { isLoopback } from './listener.ts';
import { type Announcing, checkAnnounced } from './membership.ts';

interface WorkerFields {
  readonly listen: string;
  readonly tls: object | null;
  readonly prefixCache: 'blocks' | 'radix';
  readonly evictionPolicy?: string | undefined;
  readonly dedupBlocks: boolean;
  readonly maxPinnedBlocks: number;
  readonly writeDown: 'through' | 'ahead';
  readonly kvEvents: Announcing['kvEvents'];
  readonly membership: (Announcing['membership'] & { readonly address?: string | undefined }) | null;
}

export function checkWorker(worker: WorkerFields, context: z.RefinementCtx): void {
  const refuse = (key: string, message: string): void => context.addIssue({ code: 'custom', path: [key], message });
  const { listen, tls, membership } = worker;
  if (tls === null && !isOfThisHost(listen))
    refuse('listen', `${listen} is beyond loopback; configure "tls", or listen on 127.0.0.1`);
  if (worker.prefixCache === 'radix') {
    const remedy = 'set prefixCache to "blocks", or leave it out';
    for (const key of ['evictionPolicy', 'dedupBlocks', 'maxPinnedBlocks'] as const)
      if (worker[key]) refuse(key, `is of hashed blocks, and prefixCache is "radix"; ${remedy}`);
    if (worker.writeDown === 'ahead')
      refuse('writeDown', 'the radix tree cannot write down ahead of eviction; use "through"');
  }
  if (membership === null) return;
  checkAnnounced({ membership, kvEvents: worker.kvEvents }, 'address', membership.address ?? listen, context);
}

const isOfThisHost = (address: string): boolean =>
  address.startsWith('unix:') || isLoopback(address.replace(/:\d+$/, '').replace(/^\[(.*)\]$/, '$1'));
