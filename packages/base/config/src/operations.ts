/** Where the machinery around a process asks, and nobody else: probes and scrapes (docs/operating.md, "Health and metrics"; docs/cache-node.md). */
import * as z from 'zod';
import { checkHttpListener, httpHost, port, serverTlsSchema } from './listener.ts';

const operationsAt = (defaultPort: number) =>
  z
    .strictObject({
      host: httpHost.default('127.0.0.1'),
      port: port.default(defaultPort),
      tls: serverTlsSchema.nullable().default(null),
      /** Has to be said beyond loopback where no certificate is asked for: whoever reaches it reads names and load of all workers. */
      trustedNetwork: z.boolean().default(false),
    })
    .superRefine((value, context) => checkHttpListener(value, context, "the scrapers'"));

/** Of a coordinator. */
export const operationsSchema = operationsAt(9005);
export type OperationsConfig = z.infer<typeof operationsSchema>;
/** Of a cache node; whoever reaches it reads what it holds and names of tenants. */
export const nodeOperationsSchema = operationsAt(9006);
