/** Which test files take longest: the run begins with them, so that no worker is left with one when all others have ended. */

/** Twenty-five seconds and more, the longest first: FOLDER/NAME of `*.slow.test.ts`, as KVTIER_TEST_COSTS tells them with two cores. */
export const longest = [
  ...['e2e/vllm-contract', 'faults/redis-server', 'redis/redis-conformance', 'faults/redis-partitions'],
  ...['e2e/python', 'faults/gpu-worker', 'e2e/hand-off-faults', 'src/membership', 'peer/network'],
  ...['faults/node-kill', 'src/system', 'e2e/up', 'e2e/sglang-contract', 'redis/redis-tier', 'faults/engine-node'],
  ...['e2e/prefill-decode', 'faults/s3-server', 's3/s3-conformance', 'disk/kill'],
  ...['kubernetes/kubernetes-discovery', 'e2e/misfits', 'faults/hosts', 'faults/node-s3', 'src/redis-discovery'],
  ...['e2e/cluster-redis', 'e2e/npm-start', 'e2e/both-ends', 'faults/node-peers', 'src/supervisor', 'src/service'],
  ...['sim/sim', 'faults/engine-cluster', 'redis/redis-refuses', 'faults/moved-answers', 'disk/removal'],
  ...['e2e/demo', 'faults/node-redis', 'faults/renewed-credentials', 'src/client', 'src/cuda-emulated'],
  ...['peer/kill'],
];

const places = new Map(longest.map((name, place) => [`${name}.slow.test.ts`, place]));

/** Of a file, its place: `longest.length` for all that are not named. */
export const placeOf = (path: string): number => places.get(path.split('/').slice(-2).join('/')) ?? longest.length;
