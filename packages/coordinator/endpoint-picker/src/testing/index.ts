export { BarePicker } from './bare-picker.ts';
export { Gateway, GatewayStream, type Headers, type Opening, sentOn, toldBy } from './gateway.ts';
export { modes, PickerRig, ScriptedReader } from './rig.ts';
export { pod, ScriptedDispatch } from './scripted-dispatch.ts';
