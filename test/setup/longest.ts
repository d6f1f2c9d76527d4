/** Which test files take longest: the run begins with them, so that no worker is left with one when all others have ended. */

/** Eighteen seconds and more, the longest first: FOLDER/NAME of `*.slow.test.ts`, as KVTIER_TEST_COSTS tells them. */
export const longest = [
  ...['e2e/vllm-contract', 'e2e/python', 'faults/redis-server', 'e2e/up', 'e2e/npm-start', 'faults/node-kill'],
  ...['e2e/demo', 'faults/nonsense', 'src/membership', 'e2e/cluster-deaths', 'e2e/shared-call', 'redis/redis-tier'],
  ...['e2e/sglang-contract', 'faults/s3-server', 'faults/node-s3', 'src/supervisor', 'sim/sim', 'e2e/cluster-redis'],
  ...['redis/redis-strangers', 'e2e/hand-off-faults', 'disk/removal', 'disk/kill'],
];

const places = new Map(longest.map((name, place) => [`${name}.slow.test.ts`, place]));

/** Of a file, its place: `longest.length` for all that are not named. */
export const placeOf = (path: string): number => places.get(path.split('/').slice(-2).join('/')) ?? longest.length;
