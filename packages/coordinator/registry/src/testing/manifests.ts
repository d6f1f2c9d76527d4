/** The files of infra/kubernetes, as tests hold them against the schemas and each other: manifests, workloads, containers. */
import { readdirSync, readFileSync } from 'node:fs';
import { loadAllYaml } from '@kubernetes/client-node';
import { type CacheNodeConfig, cacheNodeSchema, parseConfig } from '@kvtier/config';
import { parsePod } from '../kubernetes/objects.ts';

export interface Probe {
  readonly httpGet?: { readonly path: string; readonly port: string };
  readonly exec?: { readonly command: readonly string[] };
  readonly periodSeconds: number;
  readonly failureThreshold: number;
  readonly terminationGracePeriodSeconds?: number;
}
export interface Container {
  readonly name: string;
  readonly image: string;
  readonly command?: readonly string[];
  readonly args?: readonly string[];
  readonly restartPolicy?: string;
  readonly env?: readonly { readonly name: string; readonly value?: string }[];
  readonly ports?: readonly { readonly name: string; readonly containerPort: number }[];
  readonly securityContext?: {
    readonly runAsUser?: number;
    readonly runAsNonRoot?: boolean;
    readonly allowPrivilegeEscalation?: boolean;
    readonly readOnlyRootFilesystem?: boolean;
    readonly capabilities?: { readonly drop?: readonly string[]; readonly add?: readonly string[] };
  };
  readonly startupProbe?: Probe;
  readonly livenessProbe?: Probe;
  readonly readinessProbe?: Probe;
  readonly resources?: { readonly requests: { readonly memory: string }; readonly limits: { readonly memory: string } };
  readonly lifecycle?: { readonly preStop: { readonly exec: { readonly command: readonly string[] } } };
  readonly volumeMounts: readonly { readonly name: string; readonly mountPath: string; readonly readOnly?: boolean }[];
}
export interface Compose {
  readonly services: Readonly<
    Record<
      string,
      {
        readonly image: string;
        readonly environment?: { readonly KVTIER_CONFIG: string };
        readonly volumes?: readonly string[];
      }
    >
  >;
}
export interface Pod {
  readonly containers: readonly Container[];
  readonly initContainers?: readonly Container[];
  readonly terminationGracePeriodSeconds: number;
  readonly volumes: readonly {
    readonly name: string;
    readonly emptyDir?: { readonly medium?: string; readonly sizeLimit?: string };
    readonly hostPath?: { readonly path: string; readonly type: string };
  }[];
  readonly securityContext?: {
    readonly runAsNonRoot?: boolean;
    readonly seccompProfile?: { readonly type: string };
    readonly supplementalGroups?: readonly number[];
    readonly fsGroup?: number;
    readonly fsGroupChangePolicy?: string;
  };
}
export type Labels = Readonly<Record<string, string>>;
export interface Template {
  readonly metadata: { readonly labels: Labels; readonly annotations: Labels };
  readonly spec: Pod;
}
export interface Manifest {
  readonly kind: string;
  /** Of a List. */
  readonly items?: readonly Manifest[];
  readonly metadata: { readonly name: string };
  readonly data: Labels;
  readonly spec: {
    readonly progressDeadlineSeconds?: number;
    readonly ports: readonly { readonly port: number; readonly targetPort: number | string }[];
    readonly targetPorts: readonly { readonly number: number }[];
    readonly endpointPickerRef: { readonly name: string; readonly port: { readonly number: number } };
    readonly template: Template;
    readonly selector: {
      readonly matchLabels: Labels;
      readonly matchExpressions: readonly { readonly values: readonly string[] }[];
    };
    readonly podSelector: { readonly matchLabels: Labels };
    readonly ingress: readonly { readonly ports: readonly { readonly port: number }[] }[];
    readonly podMetricsEndpoints: readonly { readonly port: string }[];
  };
}

export const infra = new URL('../../../../../infra/', import.meta.url);
export const textOf = (file: string): string => readFileSync(new URL(file, infra), 'utf8');
export const files = readdirSync(new URL('kubernetes/', infra)).map((name) => {
  const text = textOf(`kubernetes/${name}`);
  return { name, text, manifests: (loadAllYaml(text) as Manifest[]).flatMap((one) => one.items ?? [one]) };
});
export const all = files.flatMap(({ name, text, manifests }) =>
  manifests.map((manifest) => ({ name, text, manifest })),
);
export const workloads = all.filter(({ manifest }) =>
  ['Deployment', 'DaemonSet', 'StatefulSet'].includes(manifest.kind),
);
export const containersOf = ({ spec }: Template): Container[] => [...(spec.initContainers ?? []), ...spec.containers];
export const named = (name: string): Template =>
  workloads.find(({ manifest }) => manifest.metadata.name === name)!.manifest.spec.template;
export const portsOf = (template: Template): Map<string, number> =>
  new Map(
    containersOf(template).flatMap(({ ports = [] }) => ports.map(({ name, containerPort }) => [name, containerPort])),
  );

/** What a node is told by its environment, with what Kubernetes puts in for names of variables. */
export function nodeConfigOf(node: Container): CacheNodeConfig {
  const text = node.env!.find(({ name }) => name === 'KVTIER_CONFIG')!.value!;
  const said = new Map([
    ['POD_NAME', 'pod-0'],
    ['POD_IP', '10.0.0.7'],
    ['POD_ROLE', 'prefill'],
  ]);
  const before = node
    .env!.slice(
      0,
      node.env!.findIndex(({ name }) => name === 'KVTIER_CONFIG'),
    )
    .map(({ name }) => name);
  // A name that is not there, or comes later, stays as it is written.
  const filled = text.replaceAll(/\$\((\w+)\)/g, (all, name: string) =>
    before.includes(name) ? said.get(name)! : all,
  );
  return parseConfig(cacheNodeSchema, JSON.parse(filled), 'KVTIER_CONFIG');
}

/** Whether a label selector names these, by equality or by sets. */
export function selects(selector: string, labels: Labels): boolean {
  const terms = selector.match(/[^,(]+(?:\([^)]*\))?/g)!.map((term) => /^([\w./-]+)(?:=| in )(.+)$/.exec(term.trim())!);
  return terms.every(([, label, values]) => values!.match(/[\w.-]+/g)!.includes(labels[label!] ?? ''));
}

/** Running pods of these workloads as discovery knows them, each named as the workload; all on one host. */
export const podsOf = (...templates: readonly (readonly [name: string, metadata: Template['metadata']])[]) =>
  templates.map(([name, metadata]) =>
    parsePod({
      metadata: { name, resourceVersion: '1', ...metadata },
      spec: { nodeName: 'host-0' },
      status: { phase: 'Running', podIP: '10.0.0.7', conditions: [{ type: 'Ready', status: 'True' }] },
    }),
  );

/** The coordinator's, as coordinator.yaml has it. */
export const coordinatorJson = (): object =>
  JSON.parse(all.find(({ manifest }) => manifest.kind === 'ConfigMap')!.manifest.data['coordinator.json']!) as object;
