/** The coordinator of infra/kubernetes: its configuration is one, and what it names is there. */
import { readFileSync } from 'node:fs';
import { loadAllYaml } from '@kubernetes/client-node';
import { coordinatorSchema, parseConfig } from '@kvtier/config';
import { expect, it } from 'vitest';

interface Named {
  readonly name: string;
}
interface Manifest {
  readonly kind: string;
  readonly metadata: Named;
  readonly data: Readonly<Record<string, string>>;
  readonly rules: readonly { readonly resources: readonly string[]; readonly verbs: readonly string[] }[];
  readonly spec: {
    readonly ports: readonly { readonly targetPort: string }[];
    readonly selector: Readonly<Record<string, string>> & { readonly matchLabels?: Readonly<Record<string, string>> };
    readonly template: {
      readonly metadata: { readonly labels: object; readonly annotations: object };
      readonly spec: Pod;
    };
  };
}
interface Pod {
  readonly serviceAccountName: string;
  readonly containers: readonly Container[];
  readonly volumes: readonly (Named & {
    readonly configMap?: Named;
    readonly secret?: { readonly defaultMode: number };
  })[];
}
interface Container {
  readonly args: readonly string[];
  readonly ports: readonly (Named & { readonly containerPort: number })[];
  readonly volumeMounts: readonly (Named & { readonly mountPath: string })[];
}
type Probe = 'startupProbe' | 'livenessProbe' | 'readinessProbe';
type Probed = Readonly<Record<Probe, { readonly httpGet: { readonly path: string; readonly port: string } }>>;

const file = new URL('../../../../../infra/kubernetes/coordinator.yaml', import.meta.url);
const manifests = loadAllYaml(readFileSync(file, 'utf8')) as Manifest[];
const of = (kind: string): Manifest => manifests.find((one) => one.kind === kind)!;
const config = parseConfig(
  coordinatorSchema,
  JSON.parse(of('ConfigMap').data['coordinator.json']!),
  'coordinator.json',
);
const { template, selector } = of('Deployment').spec;
const container = template.spec.containers[0]! as Container & Probed;

it('is configured as the schema has it, for pods on a network that is trusted', () => {
  expect(config).toMatchObject({
    ...{ host: '0.0.0.0', trustedNetwork: false, apiKeysFile: '/keys/api', adminKeysFile: '/keys/admin' },
    ...{ discovery: { kind: 'kubernetes' }, access: { trustedNetwork: true }, kvEvents: { trustedNetwork: true } },
  });
});

it('serves where service, probes and scrapes ask', () => {
  const ports = Object.fromEntries(container.ports.map(({ name, containerPort }) => [name, containerPort]));
  expect(ports).toEqual({ https: config.port, operations: config.operations!.port });
  expect(of('Service').spec.ports.map(({ targetPort }) => targetPort)).toEqual(['https']);
  const probes = (['startupProbe', 'livenessProbe', 'readinessProbe'] as const).map((name) => container[name].httpGet);
  expect(probes.map(({ path, port }) => `${port}${path}`)).toEqual([
    ...['operations/health/live', 'operations/health/live', 'operations/health/ready'],
  ]);
  expect(template.metadata.annotations).toMatchObject({ 'prometheus.io/port': String(config.operations!.port) });
  expect([selector.matchLabels, of('Service').spec.selector]).toEqual([
    template.metadata.labels,
    template.metadata.labels,
  ]);
});

it('mounts what it reads, and no secret for everybody', () => {
  const paths = [
    container.args.at(-1)!,
    config.tls!.certFile,
    config.tls!.keyFile,
    config.apiKeysFile!,
    config.adminKeysFile!,
    ...Object.values(config.tokenizers),
  ];
  const { volumes } = template.spec;
  expect(container.volumeMounts.map(({ name }) => name)).toEqual(volumes.map(({ name }) => name));
  for (const path of paths)
    expect(
      container.volumeMounts.filter(({ mountPath }) => path.startsWith(`${mountPath}/`)),
      path,
    ).toHaveLength(1);
  expect(volumes.flatMap(({ secret }) => secret?.defaultMode ?? [])).toEqual([0o440, 0o440]);
  expect(volumes[0]!.configMap!.name).toBe(of('ConfigMap').metadata.name);
});

it('may list and watch what discovery does', () => {
  expect(of('Role').rules.flatMap(({ resources }) => resources)).toEqual(['pods', 'endpointslices']);
  for (const { verbs } of of('Role').rules) expect(verbs).toEqual(['get', 'list', 'watch']);
  expect(template.spec.serviceAccountName).toBe(of('ServiceAccount').metadata.name);
});
