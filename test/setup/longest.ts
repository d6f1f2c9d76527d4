/** Which test files take longest: the run begins with them, so that no worker is left with one when all others have ended. */

/** Eighteen seconds and more, the longest first: FOLDER/NAME of `*.slow.test.ts`, as KVTIER_TEST_COSTS tells them. */
export const longest = [
  ...['e2e/vllm-contract', 'faults/redis-server', 'e2e/up', 'src/membership', 'faults/node-kill', 'e2e/npm-start'],
  ...['redis/redis-tier', 'e2e/python', 'faults/s3-server', 'src/supervisor', 'faults/node-s3', 'e2e/demo'],
  ...['e2e/sglang-contract', 'kubernetes/kubernetes-discovery', 'redis/redis-strangers', 'e2e/hand-off-faults'],
  ...['e2e/cluster-redis', 'src/service', 'disk/kill', 'disk/removal'],
];

const places = new Map(longest.map((name, place) => [`${name}.slow.test.ts`, place]));

/** Of a file, its place: `longest.length` for all that are not named. */
export const placeOf = (path: string): number => places.get(path.split('/').slice(-2).join('/')) ?? longest.length;
