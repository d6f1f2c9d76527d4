/** Pods of a Kubernetes that say what a record says: the other way round than discovery goes. */
import { kubernetesDiscoverySchema, type NodeRecord, type WorkerRecord } from '@kvtier/config';
import type { KubeObject } from './kube-server.ts';

export const servingLabel = { 'llm-d.ai/inference-serving': 'true' };

export function podOf(worker: WorkerRecord, node?: NodeRecord): KubeObject {
  const { hostname, port } = new URL(worker.address);
  const portIn = (endpoint: string | null | undefined): string | undefined => endpoint?.split(':').at(-1);
  const says = {
    ports: port,
    'events-port': portIn(worker.events?.endpoint),
    'replay-port': portIn(worker.events?.replayEndpoint),
    'events-topic': worker.events?.topic,
    'peer-port': node?.peer == null ? undefined : String(node.peer.port),
    'node-events-port': portIn(node?.events?.endpoint),
    'node-replay-port': portIn(node?.events?.replayEndpoint),
  };
  const said = Object.entries(says).filter(([, text]) => text !== undefined) as [string, string][];
  return {
    ...{ apiVersion: 'v1', kind: 'Pod' },
    metadata: {
      name: worker.name,
      labels: {
        ...servingLabel,
        ...(worker.role === 'both' ? {} : { 'llm-d.ai/role': worker.role }),
        ...(worker.revision === '' ? {} : { 'disaggregatedset.x-k8s.io/revision': worker.revision }),
      },
      annotations: Object.fromEntries(said.map(([key, text]) => [`kvtier.io/${key}`, text])),
      // What discovery has no use for.
      managedFields: [{ manager: 'kubelet', fieldsV1: { 'f:status': {} } }],
    },
    spec: { containers: [{ name: 'engine', image: 'vllm' }] },
    status: {
      ...{ phase: 'Running', podIP: hostname },
      conditions: [{ type: 'Ready', status: worker.draining ? 'False' : 'True' }],
    },
  };
}

export const kubernetesConfig = (change: object) =>
  kubernetesDiscoverySchema.parse({ kind: 'kubernetes', eventsPort: null, ...change });
