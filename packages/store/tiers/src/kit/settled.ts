/**
 * Works that touch memory of the caller (slots of the arena), begun together. Invariant: the promise settles when the last of them has,
 * however the first one ended: who hears of it may give the memory to somebody else.
 */
export async function settled<T>(works: Iterable<PromiseLike<T>>): Promise<T[]> {
  const ends = await Promise.allSettled(works);
  return ends.map((end) => {
    if (end.status === 'rejected') throw end.reason;
    return end.value;
  });
}
