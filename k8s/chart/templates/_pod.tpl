{{/* Parts of pods that several services share. */}}

{{- define "paceline.graceSeconds" -}}
{{- $drain := .Values.drain -}}
{{- default (add $drain.preStopSeconds $drain.timeoutSeconds 15) $drain.terminationGracePeriodSeconds | int -}}
{{- end -}}

{{/* Where a pod runs. Takes its values. */}}
{{- define "paceline.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Takes what paceline.selector takes, and constraints. */}}
{{- define "paceline.topologySpread" -}}
{{- $selector := dict "labelSelector" (dict "matchLabels" (include "paceline.selector" . | fromYaml)) -}}
{{- with .constraints }}
topologySpreadConstraints:
{{- range . }}
  - {{- toYaml (merge (deepCopy .) $selector) | nindent 4 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Takes root and what is the pod's own: annotations. Nothing if there are none. */}}
{{- define "paceline.podAnnotations" -}}
{{- $annotations := deepCopy (default dict .annotations) -}}
{{- if .root.Values.prometheusAnnotations.enabled -}}
{{- $annotations = merge $annotations (dict "prometheus.io/scrape" "true" "prometheus.io/port" "9400" "prometheus.io/path" "/metrics") -}}
{{- end -}}
{{- with $annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* One setting as a service reads it from its environment. Large numbers never in scientific notation. */}}
{{- define "paceline.settingValue" -}}
{{- if kindIs "slice" . -}}{{ join "," . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}{{ printf "%.0f" . }}
{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* Environment from settings. Takes service and settings; null is left out. */}}
{{- define "paceline.settingsEnv" -}}
{{- $service := upper .service -}}
{{- range $name, $value := .settings }}
{{- if not (kindIs "invalid" $value) }}
- name: PACELINE_{{ $service }}_{{ upper $name }}
  value: {{ include "paceline.settingValue" $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Settings of all three services. Takes root, service. */}}
{{- define "paceline.commonSettings" -}}
host: "0.0.0.0"
port: {{ include "paceline.grpcPort" .service }}
metrics_port: 9400
log_level: {{ .root.Values.logLevel }}
log_format: json
drain_timeout_s: {{ .root.Values.drain.timeoutSeconds }}
model_name: {{ include "paceline.servedName" .root | quote }}
{{- end -}}

{{/* Environment that is no setting: the caches, which are the only places that can be written to, and the hub. */}}
{{- define "paceline.cacheEnv" -}}
- name: HOME
  value: /tmp
- name: XDG_CACHE_HOME
  value: /cache
- name: HF_HOME
  value: /cache/huggingface
{{- with .Values.hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- if .Values.hub.offline }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- with .Values.hub.token }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret | quote }}
      key: {{ .key | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "paceline.commonMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /cache
{{- with .Values.model.volume }}
{{- if .existingClaim }}
- name: models
  mountPath: {{ .mountPath | quote }}
  readOnly: true
  {{- with .subPath }}
  subPath: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "paceline.commonVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 4Gi
{{- with .Values.model.volume.existingClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ . | quote }}
    readOnly: true
{{- end }}
{{- end -}}

{{/* Serves on while the pod leaves the endpoints; python is what every image has. */}}
{{- define "paceline.lifecycle" -}}
{{- if .Values.drain.preStopSeconds }}
lifecycle:
  preStop:
    exec:
      command: [python, -c, "import time; time.sleep({{ .Values.drain.preStopSeconds }})"]
{{- end }}
{{- end -}}

{{/*
The three probes. "" is the health of the whole server: SERVING once the service has proved that it works, NOT_SERVING
while it drains or a pass hangs. "liveness" stays SERVING as long as the process can work.
Takes startupSeconds, port, and tls where the server speaks it: the kubelet's own gRPC probe cannot.
*/}}
{{- define "paceline.probes" -}}
{{- $check := ternary "paceline.tlsProbe" "paceline.grpcProbe" (not (empty .tls)) -}}
startupProbe:
  {{- include $check (dict "port" .port "service" "" "tls" .tls) | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ divf .startupSeconds 5 | ceil | int }}
readinessProbe:
  {{- include $check (dict "port" .port "service" "" "tls" .tls) | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  {{- include $check (dict "port" .port "service" "liveness" "tls" .tls) | nindent 2 }}
  periodSeconds: 15
  timeoutSeconds: 10
  failureThreshold: 4
{{- end -}}

{{- define "paceline.grpcProbe" -}}
grpc:
  port: {{ .port }}
  service: {{ .service | quote }}
{{- end -}}

{{/* Takes tls: folder of the server's certificate, serverName that it carries. */}}
{{- define "paceline.tlsProbe" -}}
exec:
  command: [python, /etc/paceline/probe/tls_probe.py, "{{ .port }}", "{{ .service }}", {{ .tls.folder | quote }}, {{ .tls.serverName | quote }}]
{{- end -}}

{{/* Takes root, component, workload, target, metrics: list of metric and value. */}}
{{- define "paceline.hpa" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .target | quote }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels: {{- include "paceline.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ .target | quote }}
  minReplicas: {{ .workload.autoscaling.minReplicas }}
  maxReplicas: {{ .workload.autoscaling.maxReplicas }}
  metrics:
    {{- range .metrics }}
    {{- if not (kindIs "invalid" .value) }}
    - type: Pods
      pods:
        metric:
          name: {{ .metric }}
        target:
          type: AverageValue
          averageValue: {{ printf "%.0fm" (mulf 1000 .value) }}
    {{- end }}
    {{- end }}
  {{- with .workload.autoscaling.behavior }}
  behavior: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* Takes root, component, workload, target, and pool where there is one. Nothing where it would only be in the way. */}}
{{- define "paceline.pdb" -}}
{{- $workload := .workload -}}
{{- $many := or (gt (int $workload.replicas) 1) $workload.autoscaling.enabled -}}
{{- if ternary $many $workload.pdb.enabled (kindIs "invalid" $workload.pdb.enabled) -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .target | quote }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels: {{- include "paceline.labels" . | nindent 4 }}
spec:
  {{- if kindIs "invalid" $workload.pdb.minAvailable }}
  maxUnavailable: {{ $workload.pdb.maxUnavailable }}
  {{- else }}
  minAvailable: {{ $workload.pdb.minAvailable }}
  {{- end }}
  # A replica that cannot become ready must not keep a node from being drained.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "paceline.selector" . | nindent 6 }}
{{- end -}}
{{- end -}}

{{/*
An annotation that changes with the given password of the store, so that its pods and the gateways restart together.
scrypt, because a plain digest of a weak password could be guessed from it.
*/}}
{{- define "paceline.passwordMark" -}}
{{- $auth := .Values.redis.embedded.auth -}}
{{- if and (eq .Values.redis.mode "embedded") $auth.password (not $auth.existingSecret) -}}
checksum/redis-password: {{ derivePassword 1 "long" $auth.password .Release.Name .Release.Namespace | sha256sum | trunc 16 | quote }}
{{- end -}}
{{- end -}}
