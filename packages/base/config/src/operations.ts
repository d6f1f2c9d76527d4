/** Where the machinery around a coordinator asks, and nobody else: probes and scrapes (docs/operating.md, "Health and metrics"). */
import * as z from 'zod';
import { checkHttpListener, httpHost, port, serverTlsSchema } from './listener.ts';

export const operationsSchema = z
  .strictObject({
    host: httpHost.default('127.0.0.1'),
    port: port.default(9005),
    tls: serverTlsSchema.nullable().default(null),
    /** Has to be said beyond loopback where no certificate is asked for: whoever reaches it reads names and load of all workers. */
    trustedNetwork: z.boolean().default(false),
  })
  .superRefine((value, context) => checkHttpListener(value, context, "the scrapers'"));
export type OperationsConfig = z.infer<typeof operationsSchema>;
