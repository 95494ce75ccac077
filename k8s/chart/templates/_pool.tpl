{{/* What verifiers and drafters share: all objects of one pool. */}}

{{/* A pool's values as JSON: the item over the lane's defaults. Takes root, lane, item. */}}
{{- define "paceline.pool" -}}
{{- mergeOverwrite (deepCopy (index .root.Values (printf "%sDefaults" .lane))) .item | toJson -}}
{{- end -}}

{{/* "true" if the pool's pods ask for a device, such as nvidia.com/gpu. */}}
{{- define "paceline.hasDevice" -}}
{{- $found := false -}}
{{- range $name, $_ := default dict .resources.limits -}}
{{- if contains "/" $name -}}{{- $found = true -}}{{- end -}}
{{- end -}}
{{- if $found -}}true{{- end -}}
{{- end -}}

{{/*
The strategy of a pool. Where a new pod can only start when the old one has gone (both want the device, or a cache that
one node may use at a time), surging would wait for ever.
*/}}
{{- define "paceline.poolStrategy" -}}
{{- $exclusive := and (eq .modelCache.type "pvc") (not (has "ReadWriteMany" .modelCache.accessModes)) -}}
{{- if .strategy -}}
{{- toYaml .strategy -}}
{{- else if or (include "paceline.hasDevice" .) $exclusive -}}
type: RollingUpdate
rollingUpdate:
  maxSurge: 0
  maxUnavailable: 1
{{- else -}}
type: RollingUpdate
rollingUpdate:
  maxSurge: 1
  maxUnavailable: 0
{{- end -}}
{{- end -}}

{{/* "true" if a drafter runs a head or a part of the target, and so needs the target. Takes the pool. */}}
{{- define "paceline.drafterNeedsTarget" -}}
{{- if or (include "paceline.headMethod" .) (has "layerskip" .method) -}}true{{- end -}}
{{- end -}}

{{/* The method of a drafter that needs a head. Takes the pool. */}}
{{- define "paceline.headMethod" -}}
{{- range $method := list "medusa" "eagle" "eagle3" -}}
{{- if has $method $.method -}}{{- $method -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/*
What a method builds on: none, final_norm or the head of eagle3, in the words of the verifier's served_features.
Takes method, head.
*/}}
{{- define "paceline.featuresOf" -}}
{{- if eq .method "eagle3" -}}{{- .head -}}
{{- else if has .method (list "medusa" "eagle") -}}final_norm
{{- else -}}none
{{- end -}}
{{- end -}}

{{/* The hidden states that this release's drafters want of verifiers; paceline.checks sees to it that they agree. */}}
{{- define "paceline.servedFeatures" -}}
{{- $wanted := "none" -}}
{{- range $item := .Values.drafters -}}
{{- $pool := include "paceline.pool" (dict "root" $ "lane" "drafter" "item" $item) | fromJson -}}
{{- with include "paceline.headMethod" $pool -}}
{{- $wanted = include "paceline.featuresOf" (dict "method" . "head" $pool.head) -}}
{{- end -}}
{{- end -}}
{{- $wanted | quote -}}
{{- end -}}

{{/* Settings of a pool's service as YAML. Takes root, lane, pool. */}}
{{- define "paceline.poolSettings" -}}
{{- $pool := .pool -}}
{{- $device := default (ternary "cuda" "cpu" (eq (include "paceline.hasDevice" $pool) "true")) $pool.device -}}
{{ include "paceline.commonSettings" (dict "root" .root "service" .lane) }}
{{- if eq .lane "verifier" }}
model: {{ default .root.Values.model.source $pool.model | quote }}
self_draft_method: {{ $pool.selfDraft.method }}
{{- with $pool.selfDraft.head }}
self_draft_model: {{ . | quote }}
{{- end }}
{{- if not (hasKey (default dict $pool.settings) "served_features") }}
served_features: {{ include "paceline.servedFeatures" .root }}
{{- end }}
{{- else }}
method: {{ toJson $pool.method }}
{{- $ofTarget := include "paceline.drafterNeedsTarget" $pool }}
{{- with default (ternary .root.Values.model.source "" (eq $ofTarget "true")) $pool.model }}
model: {{ . | quote }}
{{- end }}
{{- with $pool.head }}
draft_head: {{ . | quote }}
{{- end }}
{{- end }}
device: {{ $device }}
dtype: {{ default (ternary "bfloat16" "float32" (hasPrefix "cuda" $device)) $pool.dtype }}
kv_cache_bytes: {{ include "paceline.settingValue" $pool.kvCacheBytes }}
{{- if .root.Values.tls.enabled }}
tls_cert_file: /etc/paceline/tls/tls.crt
tls_key_file: /etc/paceline/tls/tls.key
{{- if .root.Values.tls.mutual }}
tls_client_ca_file: /etc/paceline/tls/ca.crt
{{- end }}
{{- end }}
{{- end -}}

{{/* All objects of a pool. Takes root, lane, item. */}}
{{- define "paceline.poolObjects" -}}
{{- $pool := include "paceline.pool" . | fromJson -}}
{{- $target := printf "%s-%s-%s" (include "paceline.fullname" .root) .lane $pool.name -}}
{{- $this := dict "root" .root "lane" .lane "component" .lane "pool" $pool "target" $target "workload" $pool -}}
---
{{ include "paceline.poolDeployment" $this }}
{{- if and (eq $pool.modelCache.type "pvc") (not $pool.modelCache.existingClaim) }}
---
{{ include "paceline.poolCacheClaim" $this }}
{{- end }}
{{- with include "paceline.pdb" $this }}
---
{{ . }}
{{- end }}
{{- if $pool.autoscaling.enabled }}
---
{{ include "paceline.hpa" (merge $this (dict "metrics" (list
  (dict "metric" "paceline_queue_time_recent_seconds" "value" $pool.autoscaling.targetQueueTimeSeconds)
  (dict "metric" "paceline_utilization" "value" $pool.autoscaling.targetUtilization)))) }}
{{- end }}
{{- end -}}

{{- define "paceline.poolDeployment" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $port := include "paceline.grpcPort" .lane -}}
{{- $tls := ternary (dict "folder" "/etc/paceline/tls" "serverName" $root.Values.tls.serverName) dict $root.Values.tls.enabled -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .target | quote }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels: {{- include "paceline.labels" . | nindent 4 }}
spec:
  {{- if not $pool.autoscaling.enabled }}
  replicas: {{ $pool.replicas }}
  {{- end }}
  minReadySeconds: {{ $pool.minReadySeconds }}
  # Ending the old pod and loading the model take long, and are no failure of the rollout.
  progressDeadlineSeconds: {{ add $pool.startupSeconds (include "paceline.graceSeconds" $root | int) $pool.minReadySeconds 300 }}
  strategy: {{- include "paceline.poolStrategy" $pool | nindent 4 }}
  selector:
    matchLabels: {{- include "paceline.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "paceline.podLabels" . | nindent 8 }}
      {{- with include "paceline.podAnnotations" (dict "root" $root "annotations" $pool.podAnnotations) | trim }}{{ nindent 6 . }}{{ end }}
    spec:
      serviceAccountName: {{ include "paceline.fullname" $root }}-replica
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ include "paceline.graceSeconds" $root }}
      securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 8 }}
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with include "paceline.placement" $pool | trim }}{{ nindent 6 . }}{{ end }}
      {{- with include "paceline.topologySpread" (merge (dict "constraints" $pool.topologySpreadConstraints) .) | trim }}{{ nindent 6 . }}{{ end }}
      containers:
        - name: {{ .lane }}
          image: {{ include "paceline.image" (dict "root" $root "service" .lane "override" $pool.image) | quote }}
          imagePullPolicy: {{ $root.Values.images.pullPolicy }}
          ports:
            - {name: grpc, containerPort: {{ $port }}, protocol: TCP}
            - {name: metrics, containerPort: 9400, protocol: TCP}
          env:
            {{- include "paceline.cacheEnv" $root | nindent 12 }}
            {{- with include "paceline.settingsEnv" (dict "service" .lane "settings" (include "paceline.poolSettings" . | fromYaml)) | trim }}{{ nindent 12 . }}{{ end }}
            {{- with include "paceline.settingsEnv" (dict "service" .lane "settings" $pool.settings) | trim }}{{ nindent 12 . }}{{ end }}
            {{- with $pool.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          {{- include "paceline.probes" (dict "startupSeconds" $pool.startupSeconds "port" $port "tls" $tls) | nindent 10 }}
          {{- with include "paceline.lifecycle" $root | trim }}{{ nindent 10 . }}{{ end }}
          resources: {{- toYaml $pool.resources | nindent 12 }}
          securityContext: {{- toYaml $root.Values.containerSecurityContext | nindent 12 }}
          volumeMounts:
            {{- include "paceline.commonMounts" $root | nindent 12 }}
            {{- if $root.Values.tls.enabled }}
            - {name: tls, mountPath: /etc/paceline/tls, readOnly: true}
            - {name: probe, mountPath: /etc/paceline/probe, readOnly: true}
            {{- end }}
            {{- with $pool.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        {{- include "paceline.commonVolumes" $root | nindent 8 }}
        - name: cache
          {{- if eq $pool.modelCache.type "pvc" }}
          persistentVolumeClaim:
            claimName: {{ default (printf "%s-cache" .target) $pool.modelCache.existingClaim | quote }}
          {{- else }}
          emptyDir:
            sizeLimit: {{ $pool.modelCache.size }}
          {{- end }}
        {{- if $root.Values.tls.enabled }}
        - name: tls
          secret: {secretName: {{ $root.Values.tls.serverSecret | quote }}, defaultMode: 0440}
        - name: probe
          configMap: {name: {{ include "paceline.fullname" $root }}-probe}
        {{- end }}
        {{- with $pool.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end -}}

{{- define "paceline.poolCacheClaim" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .target }}-cache
  namespace: {{ .root.Release.Namespace | quote }}
  labels: {{- include "paceline.labels" . | nindent 4 }}
  annotations:
    # Models are large: they survive the release.
    helm.sh/resource-policy: keep
spec:
  accessModes: {{- toYaml .pool.modelCache.accessModes | nindent 4 }}
  {{- with .pool.modelCache.storageClassName }}
  storageClassName: {{ . | quote }}
  {{- end }}
  resources:
    requests:
      storage: {{ .pool.modelCache.size }}
{{- end -}}

{{/* The Service by which gateways find all pools of a lane, and who may connect. Takes root, lane. */}}
{{- define "paceline.laneObjects" -}}
{{- $this := dict "root" .root "component" .lane -}}
{{- $policy := .root.Values.networkPolicy -}}
{{- $port := include "paceline.grpcPort" .lane -}}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ include "paceline.fullname" .root }}-{{ .lane }}s
  namespace: {{ .root.Release.Namespace | quote }}
  labels: {{- include "paceline.labels" $this | nindent 4 }}
spec:
  clusterIP: None
  # Only replicas that have proved that they work.
  publishNotReadyAddresses: false
  selector: {{- include "paceline.selector" $this | nindent 4 }}
  ports:
    - {name: grpc, port: {{ $port }}, targetPort: grpc, protocol: TCP{{ if not .root.Values.tls.enabled }}, appProtocol: kubernetes.io/h2c{{ end }}}
    - {name: metrics, port: 9400, targetPort: metrics, protocol: TCP}
{{- if $policy.enabled }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "paceline.fullname" .root }}-{{ .lane }}s
  namespace: {{ .root.Release.Namespace | quote }}
  labels: {{- include "paceline.labels" $this | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "paceline.selector" $this | nindent 6 }}
  policyTypes: [Ingress{{ if $policy.egress.enabled }}, Egress{{ end }}]
  ingress:
    - from:
        - podSelector:
            matchLabels: {{- include "paceline.selector" (dict "root" .root "component" "gateway") | nindent 14 }}
      ports:
        - {port: {{ $port }}, protocol: TCP}
    {{- include "paceline.metricsIngress" .root | nindent 4 }}
  {{- if $policy.egress.enabled }}
  egress:
    {{- include "paceline.modelEgress" .root | nindent 4 }}
    {{- with $policy.egress.replicaRules }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}
