/**
 * The seed of one draw: a function of the request's seed and the position of the token drawn, and of nothing else, so
 * that batching, preemption and cache hits cannot change what is drawn. The mixer is splitmix64 (Steele et al. 2014).
 */
const mask = (1n << 64n) - 1n;
const golden = 0x9e3779b97f4a7c15n;

function splitmix64(state: bigint): bigint {
  let z = (state + golden) & mask;
  z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & mask;
  z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & mask;
  return z ^ (z >> 31n);
}

export function drawSeed(requestSeed: bigint, position: number): bigint {
  return splitmix64(splitmix64(requestSeed & mask) ^ BigInt(position));
}
