/** Which slow test files take longest: the run begins with them, so that no worker is left with one when all others have ended. */

/** Twenty seconds and more, the longest first: FOLDER/NAME of `*.slow.test.ts`, as KVTIER_TEST_COSTS tells them. */
export const longest = [
  ...['e2e/vllm-contract', 'e2e/python', 'e2e/cluster-deaths', 'src/cuda-kernels', 'src/gpu-session', 'sim/apart'],
  ...['src/cuda-spills', 'src/membership', 'e2e/up', 'faults/nonsense', 'faults/redis-server', 'e2e/shared-call'],
  ...['e2e/demo', 'e2e/sglang-contract', 'faults/s3-server', 'src/text-pool', 'e2e/npm-start', 'faults/node-s3'],
  ...['e2e/cluster-redis', 'e2e/cluster', 'src/replaced-model', 'e2e/hand-off-faults', 'faults/engine-node'],
];

const places = new Map(longest.map((name, place) => [`${name}.slow.test.ts`, place]));

/** Of a file, its place among them; `longest.length` when it is none of them. */
export const placeOf = (path: string): number => places.get(path.split('/').slice(-2).join('/')) ?? longest.length;
