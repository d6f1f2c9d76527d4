/**
 * Waits until all of this work has ended, and then rejects with the first rejection there was. `Promise.all` rejects while the rest
 * goes on: for reads into slots that is too early (`Tier.read`).
 */
export async function allEnded(work: readonly Promise<unknown>[]): Promise<void> {
  for (const result of await Promise.allSettled(work)) if (result.status === 'rejected') throw result.reason;
}
