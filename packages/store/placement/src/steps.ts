/**
 * What is done to many blocks goes on over several turns: between two steps whoever drives it lets others in. It may be left early,
 * by `return`: then it gives back what it holds for itself meanwhile, and what it has done stays done.
 */
export type Steps<T> = Generator<void, T, void>;

/**
 * Blocks of one step: some 2 ms, also where each is published and told to several tiers; and of one turn where they are only looked at:
 * some 10 ms. (The simulation makes them a few.)
 */
export const stepping = { blocks: 256, looked: 1_024 };

/** After `done` of `all` blocks it is somebody else's turn. */
export const isStepEnd = (done: number, all: number): boolean => done % stepping.blocks === 0 && done < all;

/** All of it in this turn, however long that is. */
export function inOneTurn<T>(steps: Steps<T>): T {
  for (let step = steps.next(); ; step = steps.next()) if (step.done) return step.value;
}
